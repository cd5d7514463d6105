"""Read conversations from sources, in order or mixed, and filter them."""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from eagle_mlx.errors import ConfigError, DataError
from eagle_mlx.progress import counted
from eagle_mlx.setting import Group, setting

from ..conversation import COUNTED, Conversation, held_out_prompts
from ..rendering import all_tokens, check_answer
from . import Source, parse
from .rows import choose, parse_row, place_of
from .stdlib import library_conversations
from .tables import RawRow, decoded, is_table, json_rows, open_rows, stream_rows, text_files

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

T = TypeVar("T")

Split = Literal["train", "heldout", "all"]
BLOCK = 10_000
"""Number of rows of a stream that are shuffled at a time."""


@dataclass(frozen=True, kw_only=True)
class FilterOptions(Group):
    """Rules to read rows and to keep conversations. Duplicates may differ in case and white space."""

    stream: bool = setting(False, "read rows as they arrive, without storing them; for data sets larger than the disk")
    skip_bad: bool = setting(False, "skip and count unusable rows; otherwise they are errors")
    keep_turns: str = setting("", "keep conversations with this many user turns", metavar="[MIN]:[MAX]")
    keep_tokens: str = setting("", "keep conversations with this many tokens", metavar="[MIN]:[MAX]")
    dedupe: Literal["none", "prompt", "conversation"] = setting(
        "none", "remove conversations with the prompt or the whole text of an earlier one"
    )

    def _check(self) -> None:
        _ = self.turns, self.tokens  # report errors at once

    @property
    def turns(self) -> range | None:
        return parse_range(self.keep_turns, "--keep-turns")

    @property
    def tokens(self) -> range | None:
        """Tokens of the whole conversation, including the template."""
        return parse_range(self.keep_tokens, "--keep-tokens")


@dataclass(frozen=True)
class DataConfig(FilterOptions):
    """Sources to read, and rules of what to keep. Raises ConfigError or DataError on creation if one is invalid.

    Sources with weights are mixed, so that each has its share at any point, until one runs out.
    """

    sources: tuple[str, ...]
    """Sources as in `SPECS`. Either all or none have weights."""
    map: tuple[str, ...] = ()
    """Field names: `role=from,content=value` for all sources, `SOURCE:prompt=question` for one."""
    limit: int | None = None
    """Maximum number of conversations from all sources together."""
    seed: int | None = 0
    """Seed of the order; None keeps the sources' own order."""

    def _check(self) -> None:
        super()._check()
        if not self.sources:
            raise ConfigError("--data is empty; give at least one source of conversations")
        _ = self.parsed  # report errors at once

    @cached_property
    def parsed(self) -> list[Source]:
        """The sources with their maps. Raises ConfigError if maps or weights do not fit them."""
        sources = [parse(text) for text in self.sources]
        weighted = [source.weight is not None for source in sources]
        if any(weighted) and not all(weighted):
            bare = self.sources[weighted.index(False)]
            raise ConfigError(f"{bare} has no weight, but others have; give each one, such as {bare}=0.5, or none")
        for text in self.map:
            place = place_of(text)
            if place and place not in [source.spec for source in sources]:
                raise ConfigError(f"--map {text}: {place} is not one of the sources, {', '.join(self.sources)}")
        return [replace(source, fields=choose(self.map, source.spec) or source.fields) for source in sources]

    def alone(self, source: str) -> DataConfig:
        """Return the configuration for reading all of this one source, with its own maps."""
        spec = parse(source).spec
        maps = tuple(text for text in self.map if place_of(text) in ("", spec))
        return replace(self, sources=(spec,), map=maps, limit=None)


def read_conversations(
    config: DataConfig,
    split: Split | None = None,
    tokenizer: TokenizerWrapper | None = None,
    report: ReadReport | None = None,
) -> Iterator[Conversation]:
    """Yield the conversations of all sources, in an order fixed by the seed; counts go to `report`.

    The split of a built-in source depends on the file, of others on a hash of the prompt. Small sources that are not
    streamed hold out more. None means `train` for built-in sources and `all` for others.

    Raises DataError, with file and line if possible, for an unusable source or row: JSON files are checked before the
    first conversation, unless they are streamed or bad rows may be left out. Raises ConfigError for a filter by tokens
    without a tokenizer.
    """
    if split not in (None, *get_args(Split)):
        raise ConfigError(f"split {split!r}: it must be train, heldout or all")
    report = report if report is not None else ReadReport()
    if config.tokens is not None and tokenizer is None:
        raise ConfigError("--keep-tokens needs a model to count tokens; give --target")
    reading, sources = _Reading(config, split, tokenizer, report), config.parsed
    streams = [reading.selected(source) for source in sources]
    if sources[0].weight is not None and len(sources) > 1:
        conversations = mix(streams, [source.weight or 0.0 for source in sources])
    else:
        conversations = chain.from_iterable(streams)
    for conversation in islice(conversations, config.limit):
        report.kept += 1
        yield conversation


def check_conversations(
    config: DataConfig, split: Split | None, answers: bool = False, with_images: bool = False
) -> None:
    """Read sources before a model is loaded, so that their errors show at once: JSON files whole, the start of others.

    `answers`: each conversation must have an answer to learn. `with_images`: they may have images. Raises DataError and
    ConfigError as `read_conversations` and `examine` do, but does not count tokens. Built-in sources have no errors.
    """
    for source in config.parsed:
        if source.kind == "builtin":
            continue
        conversations = read_conversations(replace(config.alone(source.spec), keep_tokens=""), split)
        whole = source.kind == "file" and not (is_table(source) or config.stream or config.skip_bad)
        for conversation in islice(conversations, None if whole else 1):
            if answers and not config.skip_bad:
                check_answer(conversation)
            if not with_images:
                conversation.check_text()


@dataclass
class _Reading:
    """Reads and filters sources, and counts the rows that it leaves out."""

    config: DataConfig
    split: Split | None
    tokenizer: TokenizerWrapper | None
    report: ReadReport
    seen: set[int] = field(default_factory=set)
    begun: dict[str, Iterator[Conversation | DataError]] = field(default_factory=dict)
    """The rows of JSON files whose beginning was read to count conversations."""

    @cached_property
    def held_out(self) -> frozenset[int]:
        return frozenset().union(*(held_out_prompts(self._few_keys(source)) for source in self.config.parsed))

    def selected(self, source: Source) -> Iterator[Conversation]:
        """Yield the conversations that the filters keep. The filter by turns does not apply to plain text."""
        report, turns, tokens = self.report, self.config.turns, self.config.tokens
        for conversation in self.read(source):
            if turns is not None and conversation.text is None and conversation.turns not in turns:
                report.left_out["by number of turns"] += 1
                continue
            if self.config.dedupe != "none":
                key = conversation.prompt_key() if self.config.dedupe == "prompt" else conversation.whole_key()
                if key in self.seen:
                    report.left_out["as duplicates"] += 1
                    continue
                self.seen.add(key)
            if tokens is not None and self.tokenizer is not None:
                try:
                    if len(all_tokens(self.tokenizer, conversation)) not in tokens:
                        report.left_out["by number of tokens"] += 1
                        continue
                except DataError as e:
                    self._leave_out(e, source)
                    continue
            yield conversation

    def read(self, source: Source) -> Iterator[Conversation]:
        if source.kind == "builtin":
            yield from library_conversations(source.name, self.split or "train", self.config.seed)
            return
        for conversation in self._texts(source) if source.kind == "text" else self._parsed(source):
            if self.split in (None, "all") or self._is_held_out(conversation) == (self.split == "heldout"):
                yield conversation

    def _is_held_out(self, conversation: Conversation) -> bool:
        return conversation.is_held_out or (not self.config.stream and conversation.prompt_key() in self.held_out)

    def _texts(self, source: Source) -> Iterator[Conversation]:
        texts = shuffled(text_files(Path(source.name)), self.config.seed)
        first = next(texts, None)
        if first is None:
            raise DataError(f"{source.name} has no text files in UTF-8; name a folder with some")
        yield first
        yield from texts

    def _parsed(self, source: Source) -> Iterator[Conversation]:
        parsed = partial(_parsed, source)
        if self.config.stream:
            yield from self._usable(map(parsed, shuffled(stream_rows(source), self.config.seed)), source)
            return
        if is_table(source):
            count, read = open_rows(source)
            row_at = lambda index: parsed(read(index))  # noqa: E731
        else:
            if self.split not in (None, "all"):
                _ = self.held_out  # first, since it reads the beginning of the file
            rows = list(self.begun.pop(source.spec, map(parsed, json_rows(source))))
            if not self._lenient(source):
                rows = list(self._usable(rows, source))  # errors must not appear hours later
            count, row_at = len(rows), rows.__getitem__
        order = list(range(count))
        if self.config.seed is not None:
            random.Random(self.config.seed).shuffle(order)
        yield from self._usable(map(row_at, order), source)

    def _usable(self, rows: Iterable[Conversation | DataError], source: Source) -> Iterator[Conversation]:
        for row in rows:
            if isinstance(row, DataError):
                self._leave_out(row, source)
            else:
                yield row

    def _lenient(self, source: Source) -> bool:
        return self.config.skip_bad or source.uneven

    def _leave_out(self, error: DataError, source: Source) -> None:
        """Count an unusable row. Raises the error if such rows may not be left out."""
        if not self._lenient(source):
            raise DataError(f"{error}; fix the row, or skip such rows with --skip-bad") from error
        self.report.left_out["unusable"] += 1
        self.report.first_unusable = self.report.first_unusable or str(error).splitlines()[0]

    def _few_keys(self, source: Source) -> list[int]:
        """Return the prompt keys of a source's usable conversations, if there are few."""
        if source.kind == "builtin":
            return []
        first, keys = list[Conversation | DataError](), list[int]()
        if is_table(source):
            plain = replace(self.config, seed=None, skip_bad=True)
            rows: Iterator[Conversation | DataError] = _Reading(plain, None, None, ReadReport()).read(source)
        else:
            rows = map(partial(_parsed, source), json_rows(source))
            self.begun[source.spec] = chain(first, rows)
        while len(keys) <= COUNTED and (row := next(rows, None)):
            first.append(row)
            keys += [] if isinstance(row, DataError) else [row.prompt_key()]
        return keys if len(keys) <= COUNTED else []


def _parsed(source: Source, row: RawRow) -> Conversation | DataError:
    origin, content = row
    try:
        return parse_row(decoded(content, origin), origin, source.fields)
    except DataError as e:
        return e


def mix(streams: Sequence[Iterator[Conversation]], weights: Sequence[float]) -> Iterator[Conversation]:
    """Yield from the stream that is furthest below its share (the first if tied), until that stream runs out."""
    exact = [Fraction(str(weight)) for weight in weights]  # so 7 and 3 equal 0.7 and 0.3
    shares = [weight / sum(exact) for weight in exact]
    taken = [0] * len(streams)
    while True:
        place = sum(taken) + 1
        behind = [place * share - count for share, count in zip(shares, taken, strict=True)]
        number = behind.index(max(behind))
        conversation = next(streams[number], None)
        if conversation is None:
            return
        taken[number] += 1
        yield conversation


def shuffled(parts: Sequence[Callable[[], Iterable[T]]], seed: int | None, block: int = BLOCK) -> Iterator[T]:
    """Yield every row of every part once: the parts in random order, with rows shuffled block by block.

    The order depends only on the seed and the data. If the seed is None, it is not changed.
    """
    if seed is None:
        yield from chain.from_iterable(part() for part in parts)
        return
    order = random.Random(f"{seed}/parts").sample(range(len(parts)), len(parts))
    rows = chain.from_iterable(parts[number]() for number in order)
    number = 0
    while held := list(islice(rows, block)):
        random.Random(f"{seed}/{number}").shuffle(held)
        yield from held
        number += 1


def parse_range(text: str, flag: str) -> range | None:
    """Parse `MIN:MAX`, both inclusive; either may be omitted. Return None for "". Raises ConfigError if invalid."""
    if not text:
        return None
    match = re.fullmatch(r"(\d*):(\d*)", text)
    if match is None or text == ":":
        raise ConfigError(f"{flag} {text}: it must be MIN:MAX, such as 32:4096, :4096 or 32:")
    least, most = int(match[1] or 0), int(match[2] or sys.maxsize - 1)
    if most < least:
        raise ConfigError(f"{flag} {text}: MIN must not be above MAX")
    return range(least, most + 1)


@dataclass
class ReadReport:
    kept: int = 0
    first_unusable: str = ""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of conversations by reason."""

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} {why}" for why, count in self.left_out.most_common())
        first = f"\n  the first unusable row: {self.first_unusable}" if self.first_unusable else ""
        return f"{counted(self.kept, 'conversation')} read" + (f"; left out: {reasons}{first}" if reasons else "")
