"""A file of made-up conversations that is made once and found again, never taken for that of other settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_mlx.engine import Engine
from eagle_mlx.errors import OutputError
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.policy import FixedPolicy, ThroughputPolicy
from eagle_mlx.policy.throughput import MOST_TOKENS
from eagle_mlx.proposers.capturing import CapturingProposer
from eagle_mlx.proposers.head import HeadProposer
from eagle_mlx.shards import MANIFEST, ShardReader
from eagle_mlx.target import Target

from .conversation import Conversation, parse_row
from .growing_batch import FIRST_ROWS, let_grow
from .made import MakeConfig, MakeReport
from .made_file import Wanted, made_from, make_to_file, settings_of
from .made_shards import ShardPlace


def make_once(
    target: Target,
    config: MakeConfig,
    wanted: Wanted,
    output: str | Path,
    progress: bool = False,
    place: ShardPlace | None = None,
) -> MakeReport | None:
    """Make a file as `make_to_file` does, unless it is there; returns None where it is.

    What it was made from stands beside it, in `OUTPUT.from.json`. With a `place` the hidden states of the forwards that
    write it go there. Raises OutputError, which names the difference, where the file is there and was made from
    something else, and where the states' place is taken; otherwise as `make_to_file`.
    """
    output = Path(output)
    if output.exists():
        _compare(output, settings_of(target, config, wanted))
        return None
    if place is not None and place.folder.exists() and made_states(target, config, wanted, place) is None:
        raise OutputError(f"{place.folder} holds something else than the states of {output}; remove it, or move it")
    engine = making_engine(target, place)
    return make_to_file(engine, config, wanted, output, progress=progress, place=place, note=note_path(output))


def making_engine(target: Target, place: ShardPlace | None = None, head: DraftHead | None = None) -> Engine:
    """An engine for `make_to_file`; with a `place` it keeps the hidden states that are to go there.

    As many conversations are made at once as pay. Where a `head` drafts, it does so as much as pays, and the text is
    the same.
    """
    drafts = HeadProposer(head) if head is not None else None
    policy = ThroughputPolicy(MOST_TOKENS) if drafts is not None else FixedPolicy(0)
    layers = (*place.meta.aux_layers, target.num_layers - 1) if place is not None else ()
    proposer = CapturingProposer(layers, drafts) if layers else drafts
    return let_grow(Engine(target, proposer, policy, max_batch=FIRST_ROWS))


def prompt_keys(file: Path) -> set[int]:
    """Hashes of what the conversations of a file begin with, as duplicates are told by."""
    with file.open(encoding="utf-8") as lines:
        said = [parse_row(json.loads(line), str(file)).messages for line in lines]
    return {Conversation(tuple([m for m in messages if m.role != "system"][:1])).prompt_key() for messages in said}


def made_states(target: Target, config: MakeConfig, wanted: Wanted, place: ShardPlace) -> ShardReader | None:
    """The hidden states that were kept at a place while such a file was made; None where there are none.

    Raises ShardError for a manifest that is damaged.
    """
    if not (place.folder / MANIFEST).exists():
        return None
    found = ShardReader(place.folder)
    return found if found.manifest.made_from == made_from(settings_of(target, config), wanted, place) else None


def note_path(output: Path) -> Path:
    """Where it stands what a file was made from."""
    return output.with_name(f"{output.name}.from.json")


def _compare(output: Path, settings: Mapping[str, Any]) -> None:
    instead = f"move it away to have it made anew, or learn from it as it is with --data {output}"
    try:
        noted = json.loads(note_path(output).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        noted = None
    if not isinstance(noted, dict):
        raise OutputError(f"{output} exists, and nothing tells what it was made from; {instead}")
    now = json.loads(json.dumps(settings))
    for name in sorted(noted.keys() | now.keys()):
        if noted.get(name) != now.get(name):
            raise OutputError(f"{output} was made with {name} {noted.get(name)!r}, not {now.get(name)!r}; {instead}")
