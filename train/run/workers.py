"""Runs with several processes: rank 0 runs the loop, and workers take the steps that it broadcasts."""

from __future__ import annotations

import contextlib

from eagle_mlx.command import Stop, Stopped
from eagle_mlx.errors import EagleError
from eagle_mlx.target import Target

from ..config import TrainConfig
from ..data import Batches, TrainData
from ..distributed import World
from ..kinds import Head, resolved
from ..step import Stepper
from .phases import first_epoch
from .start import new_head

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
    head = head or new_head(target, data, config, begin=False)  # rank 0 sends its weights before the first step
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
