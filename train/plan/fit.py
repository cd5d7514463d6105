"""Whether a run fits a machine, and if not the same run with as little changed as lets it fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from eagle_mlx.errors import ConfigError
from eagle_mlx.shards.budget import gb

from ..config import TrainConfig, flag, pass_type
from . import estimate
from .estimate import Memory
from .machine import Machine
from .shapes import HeadShape, TargetShape


def memory_on(
    machine: Machine, target: TargetShape, head: HeadShape, config: TrainConfig, online: bool, states: int = 0
) -> Memory:
    """The memory of a run with resolved settings on a machine."""
    value = pass_type(config, machine.device).size
    return estimate.memory_of(target, head, config, online, states, value)


def fitting(
    machine: Machine, target: TargetShape, head: HeadShape, config: TrainConfig, online: bool
) -> dict[str, Any] | None:
    """Settings to change so that a run fits: none where it does, None where none of those tried is enough.

    The batch and what is learnt of it stay. First come fewer rows at once, which cost nothing; then passes in 16 bits,
    on a GPU; then draft steps that are computed again, which take time.
    """
    for changes in _changes(machine, config):
        taken = memory_on(machine, target, head, config.changed(**changes), online)
        if estimate.fits(taken, machine.memory):
            return changes
    return None


def check_fits(machine: Machine, target: TargetShape, head: HeadShape, config: TrainConfig, online: bool) -> None:
    """Raise ConfigError, with settings that fit or with what else would help, for a run that does not fit."""
    changes = fitting(machine, target, head, config, online)
    if changes == {}:
        return
    taken = memory_on(machine, target, head, config, online)
    if changes is None:
        estimate.check_memory(taken, machine.memory, config)
        return
    less = memory_on(machine, target, head, config.changed(**changes), online)
    raise ConfigError(
        f"this run would take {gb(taken.total)} of memory ({estimate.describe_memory(taken)}), and "
        f"{gb(machine.memory)} are free; with {as_flags(changes)} it takes {gb(less.total)}"
    )


def as_flags(changes: dict[str, Any]) -> str:
    return " ".join(flag(name) if value is True else f"{flag(name)} {value}" for name, value in changes.items())


def _changes(machine: Machine, config: TrainConfig) -> Iterator[dict[str, Any]]:
    """What to try, the least first."""
    step = config.optimization
    types: list[dict[str, Any]] = [{}]
    if machine.gpu and pass_type(config, machine.device).size > 2:
        types.append({"dtype": "bfloat16"})
    passes: list[dict[str, Any]] = [{}] if step.grad_checkpoint else [{}, {"grad_checkpoint": True}]
    now = math.ceil(step.rows / step.accumulate)
    for again in passes:
        for dtype in types:
            for at_once in range(now, 0, -1):
                parts = {} if at_once == now else {"accumulate": math.ceil(step.rows / at_once)}
                yield {**parts, **dtype, **again}
