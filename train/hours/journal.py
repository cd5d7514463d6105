"""What a run of so many hours has done, on the disk, so that it continues behind any end at the phase it was in."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from eagle_mlx.errors import CheckpointError, OutputError
from eagle_mlx.files import write_whole

from ..step import WarmupStableDecay

FILE = "hours.json"


@dataclass(frozen=True)
class Portion:
    """A portion of data, and the learning behind it."""

    begun: float
    """Second of the run."""
    wanted: int = 0
    """Tokens; 0 for as many as the time allows."""
    makes: bool = True
    """Whether there is anything to be made. The last phase may learn alone."""
    last: bool = False
    tokens: int | None = None
    """That came of it, to learn from; None until it is whole."""
    made_seconds: float = 0.0
    rows: int = 0
    """Conversations that were made at once; 0 where this is not known."""
    schedule: WarmupStableDecay | None = None
    """Of the learning after it; None before that begins."""
    epoch: int = 0
    """The first one of that."""
    fresh: int = 0
    """The first portion whose data come first in that phase; the others have been learned before."""
    learned: int = 0
    """Tokens learned in that phase, each as often as it was."""
    learned_seconds: float = 0.0
    """Seconds that the phase took, its measurement left out."""
    until: tuple[int, int] = (0, 0)
    """Epoch and batch at which learning stopped."""
    acceptance_length: float | None = None
    """τ behind it; None until it was measured."""

    @property
    def done(self) -> bool:
        return self.acceptance_length is not None


@dataclass(frozen=True)
class Journal:
    elapsed: float = 0.0
    """Seconds of the run when it was written."""
    prompts: int = 0
    """On which heads are judged; 0 before that is known."""
    portions: tuple[Portion, ...] = ()

    @property
    def made(self) -> int:
        """Tokens of all portions that are whole."""
        return sum(portion.tokens or 0 for portion in self.portions)

    def changed(self, number: int, **values: Any) -> Self:
        """With other values in a portion."""
        portions = list(self.portions)
        portions[number] = replace(portions[number], **values)
        return replace(self, portions=tuple(portions))


def write(folder: Path, journal: Journal) -> None:
    """Put it into the folder of a run. Raises OutputError."""
    try:
        write_whole(folder / FILE, (json.dumps(asdict(journal), indent=1) + "\n").encode())
    except OSError as e:
        raise OutputError(f"{folder / FILE} could not be written: {e.strerror or e}; make room and --resume") from e


def read(folder: Path) -> Journal:
    """That of a run in a folder; an empty one where none was written yet. Raises CheckpointError for a damaged one."""
    file = folder / FILE
    if not file.exists():
        return Journal()
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        portions = [_portion(one) for one in values["portions"]]
        return Journal(values["elapsed"], values["prompts"], tuple(portions))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{file} cannot be read: {e}; begin another run") from e


def _portion(values: dict[str, Any]) -> Portion:
    schedule = WarmupStableDecay(**values["schedule"]) if values["schedule"] else None
    return Portion(**{**values, "schedule": schedule, "until": tuple(values.get("until", (0, 0)))})
