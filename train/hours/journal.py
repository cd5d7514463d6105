"""The journal of a run with a time limit, saved to disk so that the run can resume in its current phase."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from eagle_mlx.errors import CheckpointError
from eagle_mlx.files import write_whole

from ..step import WarmupStableDecay

FILE = "hours.json"


@dataclass(frozen=True)
class Portion:
    """A portion of data, and the learning phase after it."""

    begun: float
    """Second of the run at which it began."""
    wanted: int = 0
    """Tokens to make; 0 for as many as the time allows."""
    makes: bool = True
    """Whether data is made. The last phase may only learn."""
    last: bool = False
    tokens: int | None = None
    """Tokens that were made; None until the portion is complete."""
    made_seconds: float = 0.0
    schedule: WarmupStableDecay | None = None
    """Schedule of the learning phase; None before it begins."""
    epoch: int = 0
    """First epoch of the learning phase."""
    fresh: int = 0
    """The first portion with data that this phase learns first; earlier portions were learned before."""
    learned: int = 0
    """Tokens learned in that phase, including repetitions."""
    learned_seconds: float = 0.0
    """Seconds of the phase without its measurement."""
    until: tuple[int, int] = (0, 0)
    """Epoch and batch at which learning stopped."""
    acceptance_length: float | None = None
    """τ after the phase; None until it is measured."""

    @property
    def done(self) -> bool:
        return self.acceptance_length is not None


@dataclass(frozen=True)
class Warmup:
    """The learning phase on text, before the one after the first portion."""

    schedule: WarmupStableDecay
    tokens: int = 0
    """Tokens learned."""
    acceptance_length: float | None = None
    """τ after the phase; None until it is measured."""


@dataclass(frozen=True)
class Journal:
    elapsed: float = 0.0
    warmup: Warmup | None = None
    """None before it begins, and in runs without one."""
    portions: tuple[Portion, ...] = ()

    @property
    def made(self) -> int:
        """Tokens of all complete portions."""
        return sum(portion.tokens or 0 for portion in self.portions)

    def changed(self, number: int, **values: Any) -> Self:
        """Return a copy with other values in one portion."""
        portions = list(self.portions)
        portions[number] = replace(portions[number], **values)
        return replace(self, portions=tuple(portions))


def write(folder: Path, journal: Journal) -> None:
    """Write the journal into a run's folder. Raises OSError."""
    write_whole(folder / FILE, TypeAdapter(Journal).dump_json(journal, indent=1) + b"\n")


def read(folder: Path) -> Journal:
    """Return the journal in a run's folder, or an empty one. Raises CheckpointError if it is damaged."""
    file = folder / FILE
    if not file.exists():
        return Journal()
    try:
        return TypeAdapter(Journal).validate_json(file.read_bytes())
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{file} cannot be read: {e}; start another run") from e
