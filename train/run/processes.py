"""A run of several processes: the first one leads, the others take the steps that it orders."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from eagle_mlx.errors import EagleError
from eagle_mlx.target import Target

from ..command import Stop, Stopped
from ..config import TrainConfig
from ..data import Batches, Rows, TrainData
from ..distributed import World
from ..kinds import KINDS, Head, resolved
from ..step import Stepper

_AGREE = "agree"


class Lead:
    """What the first process asks of the others. Alone it asks nobody."""

    def __init__(self, world: World, stop: Stop):
        self._world, self._stop = world, stop
        self._over = world.size == 1

    def step(self, epoch: int, batch: int, factor: float) -> None:
        """All take their part of that batch next. Raises Stopped where one of them was asked to stop."""
        self._order([epoch, batch, factor])

    def agree(self, stepper: Stepper) -> None:
        """All get this process's head and optimizer state."""
        if not self._over:
            self._order(_AGREE)
            stepper.agree()

    def end(self) -> None:
        """The others stop."""
        if not self._over:
            self._over = True
            with contextlib.suppress(EagleError):  # they have ended already
                self._world.any(True)

    def _order(self, order: object) -> None:
        if self._over:
            return
        if self._world.any(self._stop.asked):
            self._over = True
            raise Stopped
        self._world.tell(order)


def follow(target: Target, data: TrainData, config: TrainConfig, head: Head | None, world: World, stop: Stop) -> None:
    """Train along with the first process until it ends the run. It alone measures, saves and writes."""
    config = resolved(config)
    head = head or KINDS[config.head.kind].new(target, config, data.kept, data.aux_layers)
    with stop.deferred():
        batches = Batches(data.samples, config.optimization.rows, config.optimization.length, config.run.seed, world)
        stepper = Stepper(head, target, config, world)
        stream: Generator[Rows, None, None] | None = None
        place: tuple[int, int] | None = None
        try:
            while not world.any(stop.asked):
                order = world.tell()
                if order == _AGREE:
                    stepper.agree()
                    continue
                epoch, batch, factor = order
                if stream is None or place != (epoch, batch):
                    if stream is not None:
                        stream.close()
                    stream = batches.epoch(epoch, batch)
                stepper(next(stream), factor)
                place = (epoch, batch + 1)
        finally:
            if stream is not None:
                stream.close()
