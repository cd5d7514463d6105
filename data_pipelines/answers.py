"""Regenerated answers as a file, which an interruption of any kind delays and never changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle_mlx.engine import Engine
from eagle_mlx.target import text_settings

from .conversation import Conversation
from .jsonl import as_line
from .partial import PartialFile, open_partial
from .regenerate import Numbered, RegenerateConfig, RegenerateReport, bar, numbered, regenerate_all

_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")
"""What of the sampling parameters is compared before a file is continued."""


def regenerate_to_file(
    engine: Engine,
    conversations: Iterable[Conversation],
    config: RegenerateConfig,
    output: str | Path,
    settings: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: bool = False,
    total: int | None = None,
) -> tuple[int, RegenerateReport]:
    """Answer conversations into a jsonl file; returns its rows, and the counts of them all.

    Rows are kept in `OUTPUT.partial` as soon as they are made. Where there is such a file, those that it holds are not
    made again, so the same call after any interruption continues with it, and the output is the same to the byte. So it
    is with other batch sizes and proposers, as far as the target's arithmetic does not depend on them. `settings` are
    compared as well, for whatever else the rows depend on. `total` is for the progress bar, where the number of
    conversations is not known.

    Raises OutputError where the output exists and `overwrite` is not set, or the partial file was begun with other
    settings or by a process that still runs; DataError where the data has changed since.
    """
    compared = _settings(engine, config) | dict(settings or {})
    if isinstance(conversations, Sequence):
        total = len(conversations)
    report = RegenerateReport()
    with open_partial(output, compared, overwrite) as part:
        for done in part.done.values():
            report.add(done.counts)
        keys: dict[int, int] = {}
        todo = _Todo(part, numbered(conversations), keys)
        with bar(total, len(part.done), not progress) as shown:
            for answered in regenerate_all(engine, todo, config, shown):
                row = as_line(answered.conversation) if answered.conversation is not None else b""
                counts = answered.report.counts()
                part.add(answered.position, keys.pop(answered.position), counts, row)
                report.add(counts)
                shown.update()
        return part.finish(todo.seen, overwrite), report


class _Todo:
    """The conversations that are not done yet, after a look at those that are."""

    def __init__(self, part: PartialFile, conversations: Iterator[Numbered], keys: dict[int, int]):
        self._part, self._conversations, self._keys = part, conversations, keys
        self.seen = 0

    def __iter__(self) -> Iterator[Numbered]:
        for each in self._conversations:
            self.seen += 1
            key = each.conversation.whole_key()
            if not self._part.check(each.position, key, each.conversation.origin):
                self._keys[each.position] = key
                yield each


def _settings(engine: Engine, config: RegenerateConfig) -> dict[str, Any]:
    params = asdict(config.params)
    return {
        **text_settings(engine.target),
        **{name: params[name] for name in _SETTINGS},
        "system": list(config.systems),
        "least_distinct": config.least_distinct,
    }
