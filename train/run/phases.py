"""A run as a list of phases: a plain run has one; a run of so many hours makes data between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..data import Piece, TrainData
from ..step import Schedule, span_of
from .folder import fingerprint_of
from .progress import Bar, Shows

if TYPE_CHECKING:
    from .loop import Run


@dataclass(frozen=True)
class Phase:
    """Learning from the run's data until a schedule is over; then acceptance is measured."""

    schedule: Schedule
    bar: Shows
    epoch: int = 0
    """The epoch to begin with, unless the run is further."""
    fresh: int = 0
    """In that epoch samples from this one on come first."""


class Phases(ABC):
    """What a run does, phase by phase."""

    fingerprint: str
    """Of the data, which must be the same if the run is resumed."""

    @abstractmethod
    def of(self, run: Run) -> Generator[Phase, None, None]:
        """Yield one phase after the other. Each is learned and measured before the next one is asked for.

        Before the first one this calls `run.begin` with the data and the prompts.
        """

    @abstractmethod
    def summary(self, run: Run) -> tuple[Mapping[str, Any], set[Piece]]:
        """Return what the report says of the data, and what was learned of them."""

    @abstractmethod
    def stopped(self) -> None:
        """Save and say what continues an interrupted run, besides the state of its steps."""

    @abstractmethod
    def ended(self, report: Mapping[str, Any]) -> None:
        """Tidy up after the report is written."""


class OnePhase(Phases):
    """A plain run: all of its data, until its time, steps or epochs are over."""

    def __init__(self, data: TrainData, prompts: list[list[int]]):
        """`prompts`: tokens of what acceptance is measured on."""
        self._data, self._prompts = data, prompts
        self.fingerprint = fingerprint_of(data.samples)

    def of(self, run: Run) -> Generator[Phase, None, None]:
        run.begin(self._data, self._prompts)
        if run.saved is None:
            run.watch.restart()
        schedule = span_of(run.config, run.batches.steps_per_epoch())
        with Bar(schedule, run.watch.elapsed if schedule.seconds else run.progress.step) as bar:
            yield Phase(schedule, bar)

    def summary(self, run: Run) -> tuple[Mapping[str, Any], set[Piece]]:
        return self._data.report, run.batches.learned(0, (run.progress.epoch, run.progress.batch))

    def stopped(self) -> None:
        return

    def ended(self, report: Mapping[str, Any]) -> None:
        return
