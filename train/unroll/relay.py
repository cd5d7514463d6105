"""Gradients of draft steps, added as they come: each step's are in the sum before those of the step before are begun.

Weights that all draft steps share have a gradient from each. MLX computes them in any order and adds them when it has
them all, which for seven steps is seven times the weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .recompute import holding, weights_but


class Relay:
    """A module's weights on their way from draft step to draft step."""

    def __init__(self, module: nn.Module, without: Collection[str] = ()):
        """The trainable weights, but for those of the parts named in `without`."""
        self._module = module
        self._names, self._weights = weights_but(module, without)

    def hand_on(self, *arrays: mx.array) -> list[mx.array]:
        """What the next draft step reads of the steps before it, floating numbers, as it is to read it."""
        count = len(self._names)
        handed = _handed_on(count, [*self._weights, *arrays])
        self._weights = handed[:count]
        return handed[count:]

    def holding(self) -> contextlib.AbstractContextManager[None]:
        """The module with the weights as they were handed on last, within the block."""
        return holding(self._module, self._names, self._weights)


def _handed_on(count: int, arrays: list[mx.array]) -> list[mx.array]:
    """The same arrays. In the backward pass none of their gradients is read before all of them are there.

    Gradients of the first `count` go on in float32, so that the sum over the steps is exact whatever the weights are.
    """
    forward: Any = mx.custom_function(lambda *given: list(given))

    @forward.vjp  # type: ignore[untyped-decorator]
    def backward(_: Any, cotangents: Sequence[mx.array], __: Any) -> list[mx.array]:
        found = [c.astype(mx.float32) if at < count else c for at, c in enumerate(cotangents)]
        return list(mx.depends(found, found))

    return list(forward(*arrays))
