"""Phases of a run. A plain run has one; a run with `--hours` makes data between phases.

With several processes, rank 0 runs the phases, and workers take the steps that it broadcasts.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle_mlx.command import Stop, Stopped
from eagle_mlx.errors import EagleError
from eagle_mlx.target import Target

from ..config import TrainConfig
from ..data import Batches, Joined, Piece, TrainData
from ..distributed import World
from ..kinds import Head, resolved
from ..step import Schedule, Stepper, span_of, with_warmup
from .folder import fingerprint_of
from .start import new_head, with_vocabulary
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


_SYNC = "sync"


class Workers:
    """Rank 0's control of the other processes. A single process has none."""

    def __init__(self, world: World, stop: Stop):
        self._world, self._stop = world, stop
        self._ended = world.size == 1

    def step(self, epoch: int, batch: int, factor: float) -> None:
        """Have all workers take a step on their part of a batch. Raises Stopped if any process was asked to stop."""
        self._broadcast([epoch, batch, factor])

    def sync(self, stepper: Stepper) -> None:
        """Send this process's head and optimizer state to all workers."""
        if not self._ended:
            self._broadcast(_SYNC)
            stepper.sync()

    def end(self) -> None:
        """Stop the workers."""
        if not self._ended:
            self._ended = True
            with contextlib.suppress(EagleError):  # they have already ended
                self._world.any(True)

    def _broadcast(self, command: object) -> None:
        if self._ended:
            return
        if self._world.any(self._stop.asked):
            self._ended = True
            raise Stopped
        self._world.broadcast(command)


def run_worker(
    target: Target,
    data: TrainData,
    config: TrainConfig,
    head: Head | None,
    world: World,
    stop: Stop,
    warmup: TrainData | None = None,
) -> None:
    """Train together with rank 0 until it ends the run. Only rank 0 evaluates, saves and writes."""
    config = resolved(config, target)
    if head is None:
        head = new_head(target, data, config, begin=False)  # rank 0 sends its weights before the first step
    else:
        head = with_vocabulary(head, target, data.kept, config)
    with stop.deferred():
        how, begin = config.optimization, first_epoch(config)
        parts = [Batches(one.samples, how.rows, how.length, config.run.seed, world) for one in (warmup, data) if one]
        stepper = Stepper(head, target, config, world)
        position, stream = (0, 0), parts[0].epoch(0)
        try:
            while not world.any(stop.asked):
                command = world.broadcast()
                if command == _SYNC:
                    stepper.sync()
                    continue
                epoch, batch, factor = command
                if position != (epoch, batch):
                    stream.close()
                    stream = parts[0 if epoch < begin else -1].epoch(epoch, batch)
                stepper(next(stream), factor)
                position = (epoch, batch + 1)
        finally:
            stream.close()
