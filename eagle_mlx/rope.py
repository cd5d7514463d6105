"""Rotary positions one by one: a tree's nodes stand at their depths, not one behind the other.

On the CPU chains are turned in the same way, whose angles are then found once instead of in every layer.
"""

from __future__ import annotations

import inspect
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx import fastmath
from eagle_mlx.angles import Angles


def place_one_by_one(model: nn.Module) -> Angles:
    """Let a model's rotary embeddings also take an offset [B, L], a position for each of L inputs.

    Each such module gets a subclass of its own class; with any other offset it does what it did, unless the angles that
    are returned are shared.
    """
    rotary = [module for module in model.modules() if _is_rotary(module)]
    angles = next((module.angles for module in rotary if isinstance(module, _OneByOne)), Angles())
    for module in rotary:
        if not isinstance(module, _OneByOne):
            module.__class__ = type(type(module).__name__, (_OneByOne, type(module)), {})
            module.angles = angles
    return angles


class _OneByOne:
    """Sees [B, ..., L, D] with offsets [B, L] as B * L inputs of one position each, which every rotary takes."""

    angles: Angles

    def __call__(self, x: mx.array, offset: Any = 0, *args: Any, **kwargs: Any) -> mx.array:
        plain: Any = super().__call__  # type: ignore[misc]
        dims = offset.ndim if isinstance(offset, mx.array) else 0
        if dims < 2 and not self.angles.shared:
            out: mx.array = plain(x, offset, *args, **kwargs)
            return out
        known = isinstance(offset, int) or dims > 0
        if known and x.dtype == mx.float32 and not args and not kwargs and fastmath.on_cpu():
            turns = self.angles.turns(self, plain, x.shape[-1])  # type: ignore[arg-type]
            if turns is not None and (dims > 1 or turns.suits_chains):
                return turns(x, offset)
        return self._apart(plain, x, offset, *args, **kwargs) if dims > 1 else plain(x, offset, *args, **kwargs)

    def _apart(self, plain: Any, x: mx.array, offset: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        rows, count = offset.shape
        moved = mx.moveaxis(x, -2, 1)
        shape = moved.shape
        each = moved.reshape(rows * count, *shape[2:-1], 1, shape[-1])
        turned: mx.array = plain(each, offset.reshape(-1), *args, **kwargs)
        return mx.moveaxis(turned.reshape(*shape[:-1], turned.shape[-1]), 1, -2)


def _is_rotary(module: nn.Module) -> bool:
    """By what it is called and by what it takes: mlx-lm has some kinds, and models have their own."""
    name = type(module).__name__.lower()
    return ("rope" in name or "rotary" in name) and "offset" in inspect.signature(type(module).__call__).parameters
