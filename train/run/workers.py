"""Training with several processes: rank 0 runs the phases, and workers take the steps that it broadcasts."""

from __future__ import annotations

import contextlib

from eagle_mlx.command import Stop, Stopped
from eagle_mlx.errors import EagleError
from eagle_mlx.target import Target

from ..config import TrainSettings
from ..data import Batches, TrainData
from ..distributed import World
from ..kinds import Head
from ..step import Stepper
from .start import new_head, with_vocabulary


def first_epoch(config: TrainSettings) -> int:
    """Return a plain run's first epoch on its own data. The warm-up has all epochs before."""
    return config.optimization.epochs + 1 if config.data.warmup_data else 0


_SYNC = "sync"


class Workers:
    """Rank 0's control of the other processes. A single process has none."""

    def __init__(self, world: World, stop: Stop):
        self.world, self._stop = world, stop
        self._ended = world.size == 1

    def step(self, epoch: int, batch: int, factor: float) -> None:
        """Have all workers take a step on their part of a batch. Raises Stopped if any process was asked to stop."""
        self._broadcast([epoch, batch, factor])

    def sync(self, stepper: Stepper) -> None:
        """Send this process's head and optimizer state to all workers."""
        if not self._ended:
            self._broadcast(_SYNC)
            stepper.sync()

    def close(self) -> None:
        """Stop the workers."""
        if not self._ended:
            self._ended = True
            with contextlib.suppress(EagleError):  # they have already ended
                self.world.any(True)

    def _broadcast(self, command: object) -> None:
        if self._ended:
            return
        if self.world.any(self._stop.asked):
            self._ended = True
            raise Stopped
        self.world.broadcast(command)


def run_worker(
    target: Target,
    data: TrainData,
    config: TrainSettings,
    head: Head | None,
    world: World,
    stop: Stop,
    warmup: TrainData | None = None,
) -> None:
    """Train together with rank 0 until it ends the run. Only rank 0 evaluates, saves and writes."""
    if head is None:
        head = new_head(target, data, config, begin=False)  # rank 0 sends its weights before the first step
    else:
        head = with_vocabulary(head, target, data.kept, config)
    with stop.deferred():
        how, begin = config.optimization, first_epoch(config)
        sources = [source.samples for source in (warmup, data) if source]
        parts = [Batches(samples, how.rows, how.length, config.run.seed, world) for samples in sources]
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
