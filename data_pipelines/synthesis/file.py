"""Write conversations that a target makes up to a file. The same seed gives the same bytes despite interruptions."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from eagle_mlx.engine import Engine
from eagle_mlx.errors import ConfigError, DataError, OutputError
from eagle_mlx.files import write_output
from eagle_mlx.progress import counted, progress_bar

from ..conversation import Conversation
from ..jsonl import Done, PartialFile, as_line, difference, open_partial
from ..options import MakeConfig
from ..sources.rows import parse_row
from .loop import run_tasks, text_settings
from .tries import MakeReport, Try, tries

FREE_TRIES = 64
"""Number of tries that may all fail. If one try in twenty is usable, at least one of 64 is with probability 0.96."""
TRIES_A_ROW = 20
"""Maximum number of tries per kept conversation. A good target needs fewer than two."""


@dataclass(frozen=True)
class Wanted:
    """The number of rows or tokens to make. Raises ConfigError on creation unless exactly one is given."""

    rows: int = 0
    tokens: int = 0
    """Total tokens, including the template. The conversation that reaches this number is the last."""

    def __post_init__(self) -> None:
        if (self.rows > 0) == (self.tokens > 0) or min(self.rows, self.tokens) < 0:
            raise ConfigError("give either --rows N or --tokens N")

    def reached(self, rows: float, tokens: float) -> bool:
        return rows >= self.rows if self.rows else tokens >= self.tokens


Enough = Callable[[int, int], bool]
"""Called before each try with the tokens made so far and the tokens expected from running tries."""


@dataclass(frozen=True)
class MakeLimits:
    """Conditions that end the file early, and duplicates to leave out."""

    elsewhere: Collection[int] = ()
    """Hashes of first messages in other files (see `prompt_keys`), which make a conversation a duplicate."""
    enough: Enough = lambda made, coming: False
    """Once it returns true, no try starts except in the first batch; running tries finish."""
    over: Callable[[int], bool] = lambda made: False
    """Called before each step with the tokens made so far. Once true, tries stop; their complete turns are kept."""
    first: bool = True
    """Whether the first batch always runs, so that even a short time gives a result."""


@dataclass
class Selection:
    """Chooses tries in order of their numbers, without duplicates, until there are enough.

    A try is settled once it and all before it have ended, so the order in which tries end changes nothing.
    """

    wanted: Wanted
    rows: list[int] = field(default_factory=list)
    report: MakeReport = field(default_factory=MakeReport)
    settled: int = 0
    _ended: dict[int, Done] = field(default_factory=dict)
    """Ended but unsettled tries."""
    seen: set[int] = field(default_factory=set)

    @property
    def full(self) -> bool:
        return self.wanted.reached(len(self.rows), self.report.tokens)

    @property
    def ended(self) -> tuple[int, int]:
        """Number of conversations and tokens so far, including unsettled tries."""
        coming = [done.counts["tokens"] for done in self._ended.values() if done.row]
        return len(self.rows) + len(coming), self.report.tokens + sum(coming)

    def add(self, number: int, done: Done) -> None:
        """Add a try that has ended. Raises DataError if too many tries have failed."""
        self._ended[number] = done
        while not self.full and self.settled in self._ended:
            self._settle(self._ended.pop(self.settled))

    def promising(self, running: int) -> bool:
        """Return whether the ended and `running` tries will probably be enough."""
        rows, tokens = self.ended
        return self.wanted.reached(rows + running * self._usable, tokens + self.coming(running))

    def coming(self, running: int) -> int:
        """Return the number of tokens expected from `running` tries, given those that have ended."""
        rows, tokens = self.ended
        return round(running * self._usable * tokens / max(1, rows))

    @property
    def _usable(self) -> float:
        return (1 + self.ended[0]) / (1 + self.settled + len(self._ended))

    def _settle(self, done: Done) -> None:
        counts = done.counts
        if done.row and done.key in self.seen:
            counts = {"tries": 1, "duplicates": 1}
        elif done.row:
            self.seen.add(done.key)
            self.rows.append(self.settled)
        self.report = self.report.plus(counts)
        self.settled += 1
        if self.settled - self.report.late > FREE_TRIES + TRIES_A_ROW * len(self.rows):
            raise DataError(
                f"too few tries are usable: {len(self.rows):,} of {counted(self.settled, 'try')}; the others failed: "
                f"{self.report.failures()}; give the target prompts to answer instead (eagle-data regenerate --data "
                "prompts.jsonl)"
            )


def make_to_file(
    engine: Engine,
    config: MakeConfig,
    wanted: Wanted,
    output: str | Path,
    overwrite: bool = False,
    progress: bool = False,
    limits: MakeLimits | None = None,
) -> MakeReport:
    """Have the target make up conversations into a jsonl file; return counts of the tries.

    The same call after an interruption continues with `OUTPUT.partial`, even if more or less is wanted now. The file
    has the same bytes despite interruptions, batch sizes and proposers, except for the target's rounding. `limits` may
    end it early.

    Raises OutputError if the output exists without `overwrite`, cannot be written or was begun with other settings;
    DataError if nothing usable is made.
    """
    settings, limits = {**text_settings(engine.target), **asdict(config)}, limits or MakeLimits()
    with open_partial(output, settings, overwrite) as part:
        selection = Selection(wanted, seen=set(limits.elsewhere))
        for number in sorted(part.done):
            selection.add(number, part.done[number])
        if not selection.full:
            _make(engine, config, part, selection, limits, progress)
        if not selection.rows:
            raise DataError(
                f"none of {counted(selection.settled, 'try')} has given a conversation yet; they failed: "
                f"{selection.report.failures()}; allow more time"
            )
        part.finish_with(selection.rows)
    return selection.report


def _make(
    engine: Engine, config: MakeConfig, part: PartialFile, selection: Selection, limits: MakeLimits, progress: bool
) -> None:
    begin = tries(engine, config)
    numbers = (number for number in count() if number not in part.done)
    ahead = next(numbers)
    reached = max(part.done, default=-1)
    first = engine.max_batch if limits.first else 0

    def following(running: int) -> Try | None:
        nonlocal ahead
        # Gaps between finished tries must be filled first, even if there would be enough.
        over = ahead >= first and limits.enough(selection.ended[1], selection.coming(running))
        if selection.full or (ahead > reached and (over or selection.promising(running))):
            return None
        begun, ahead = ahead, next(numbers)
        return begin(begun)

    total, unit = (selection.wanted.rows, 0) if selection.wanted.rows else (selection.wanted.tokens, 1)
    bar: dict[str, Any] = {"desc": "make", "unit": ("conversation", "token")[unit], "disable": not progress}
    with progress_bar(total=total, initial=selection.ended[unit], smoothing=0.02, **bar) as shown:
        for ended in run_tasks(engine, following, lambda: limits.over(selection.ended[1])):
            conversation, key = ended.result()
            row = as_line(conversation, domain=ended.domain) if conversation is not None else b""
            part.add(ended.number, key, ended.report.counts(), row)
            selection.add(ended.number, part.done[ended.number])
            shown.update(min(selection.ended[unit], total) - shown.n)
            if selection.full:
                return


def once(output: Path, settings: Mapping[str, Any], make: Callable[[], str]) -> str | None:
    """Have `make` write a file and describe it, or return None if it exists. Raises OutputError for other settings."""
    note = output.with_name(f"{output.name}.from.json")
    if output.exists():
        _compare(output, note, settings)
        return None
    write_output(note, json.dumps(settings, indent=2) + "\n")
    return make()


def prompt_keys(file: Path) -> set[int]:
    """Return hashes of the first messages of a file's conversations, as used to find duplicates."""
    with file.open(encoding="utf-8") as lines:
        conversations = [parse_row(json.loads(line), str(file)).messages for line in lines]
    firsts = (next((m for m in messages if m.role != "system"), None) for messages in conversations)
    return {Conversation((first,) if first else ()).prompt_key() for first in firsts}


def _compare(output: Path, note: Path, settings: Mapping[str, Any]) -> None:
    instead = f"move it away to make it again, or train on it as it is with --data {output}"
    try:
        noted = dict(json.loads(note.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise OutputError(f"{output} exists, but its settings are not recorded; {instead}") from None
    if wrong := difference(noted, settings):
        raise OutputError(f"{output} was made with {wrong}; {instead}")
