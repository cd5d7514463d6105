"""Phases of a run. A plain run has one; a run with `--hours` makes data between phases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import TrainConfig
from ..data import Joined, Piece, TrainData
from ..step import Schedule, span_of, with_warmup
from .folder import fingerprint_of
from .state import Bar

if TYPE_CHECKING:
    from .loop import Run


@dataclass(frozen=True)
class Phase:
    """Training on the run's data until a schedule is over, and then a measurement of acceptance."""

    schedule: Schedule
    bar: Bar
    epoch: int = 0
    """The first epoch, unless the run is already in a later one."""
    fresh: int = 0
    """In that epoch, samples from this index on come first."""


class Phases(ABC):
    """The phases of a run, and what happens between and after them."""

    fingerprint: str
    """Fingerprint of the data. It must not change if the run is resumed."""

    @abstractmethod
    def of(self, run: Run) -> Generator[Phase, None, None]:
        """Yield phases. Each is trained and measured before the next one is requested.

        Calls `run.begin` with data and prompts before the first phase.
        """

    @abstractmethod
    def summary(self, run: Run) -> tuple[Mapping[str, Any], set[Piece]]:
        """Return the report's facts about the data, and the pieces that were learned."""

    @abstractmethod
    def ended(self, report: Mapping[str, Any] | None) -> None:
        """Clean up after the report is written. If the run was interrupted (None), save what a resume needs."""


class PlainPhases(Phases):
    """A plain run, which trains on all data until its time, steps or epochs are over; first on the warm-up's text."""

    def __init__(
        self, data: TrainData, prompts: list[list[int]], warmup: TrainData | None = None, seconds: float = 0.0
    ):
        """`prompts`: tokens of the prompts for acceptance. `warmup`: text to learn from first.

        `seconds`: expected for training, 0 if unknown.
        """
        self._data, self._prompts, self._warmup, self._seconds = data, prompts, warmup, seconds
        whole = data.samples if warmup is None else Joined([warmup.samples, data.samples])
        self.fingerprint = fingerprint_of(whole)

    def of(self, run: Run) -> Generator[Phase, None, None]:
        run.begin(self._data, self._prompts, self._seconds)
        if run.saved is None:
            run.watch.restart()
        schedule, warmup = span_of(run.config, run.batches.steps_per_epoch()), None
        if self._warmup is not None:
            run.learn_from(self._warmup)
            warmup, schedule = with_warmup(schedule, run.config, run.batches.steps_per_epoch())
        begin = first_epoch(run.config)
        done = run.watch.elapsed if schedule.seconds else run.progress.step
        with Bar(schedule.seconds, schedule.steps, done) as bar:
            if warmup is not None:
                if run.progress.epoch < begin:
                    yield Phase(warmup, bar)
                run.learn_from(self._data)
            yield Phase(schedule, bar, begin)

    def summary(self, run: Run) -> tuple[Mapping[str, Any], set[Piece]]:
        report = {**self._data.report, **(self._warmup.report if self._warmup is not None else {})}
        return report, run.batches.learned(first_epoch(run.config), (run.progress.epoch, run.progress.batch))

    def ended(self, report: Mapping[str, Any] | None) -> None:
        return


def first_epoch(config: TrainConfig) -> int:
    """Return a plain run's first epoch on its own data. The warm-up has all epochs before."""
    return config.optimization.epochs + 1 if config.data.warmup_data else 0
