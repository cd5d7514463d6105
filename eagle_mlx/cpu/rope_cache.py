"""RoPE angles, computed once for all layers that rotate in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from eagle_mlx.cpu.shortcuts import use_shortcuts

Rotary = Callable[[mx.array, mx.array], mx.array]
"""Maps inputs [N, H, 1, D] and their positions [N] int32 to rotated inputs of the same shape."""


class RopeCache:
    """How each of a model's RoPE modules rotates.

    On the CPU, RoPE of a few positions takes about twenty small operations, and most of them compute the same angles in
    every layer; a GPU has one kernel for all of them. To learn how a module rotates, we apply it to unit vectors. If it
    rotates pairs of numbers by angles that depend on the position, the results are the cosines and sines.
    """

    def __init__(self) -> None:
        self.shared = False
        """Whether chains use these rotations, too; trees always do."""
        self._kinds: dict[tuple[int, bytes], Rotation] = {}
        self._of: dict[tuple[int, int], Rotation | None] = {}
        """By the module's id (modules live as long as the model) and the width of its inputs."""

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Within the block, let forwards compute their angles once for all layers, if that is faster."""
        self.shared = use_shortcuts()
        try:
            yield
        finally:
            self.shared = False
            for rotation in self._kinds.values():
                rotation.clear()

    def rotation(self, module: nn.Module, rotary: Rotary, dim: int) -> Rotation | None:
        """Return how this module rotates vectors of `dim` numbers; None if it does not rotate pairs."""
        key = id(module), dim
        if key not in self._of:
            partner = _partners(rotary, dim)
            new = None if partner is None else Rotation(rotary, partner)
            self._of[key] = None if new is None else self._kinds.setdefault((dim, new.signature()), new)
        return self._of[key]


class Rotation:
    """How one kind of RoPE module rotates: number i and its partner, by the angle of their position."""

    _PROBES = (0, 1, 2, 3, 31, 1000, 4095, 30011)
    """Modules that agree at these positions are considered the same."""

    def __init__(self, rotary: Rotary, partner: np.ndarray[Any, np.dtype[np.int64]]):
        self._rotary = rotary
        dim = len(partner)
        self._half = dim // 2 if np.array_equal(partner, np.roll(np.arange(dim), dim // 2)) else 0
        """Half of the vector's length if the two halves are partners, else 0."""
        self._partner = mx.array(partner, mx.int32)
        self._first = mx.array(np.arange(dim) <= partner)
        self._units = mx.stack([self._first, ~self._first]).astype(mx.float32)[:, None]
        self.clear()
        self.suits_chains = self._half > 0 and self._matches_module()
        """Whether the results equal the module's own to the last bit and are cheaper."""

    def clear(self) -> None:
        self._at: tuple[int | mx.array, int] = -1, 0
        """The offset and the number of positions of the cached angles."""
        self._cos_sin: tuple[mx.array, mx.array] = self._first, self._first

    def _matches_module(self) -> bool:
        x = mx.random.normal((1, len(self._PROBES), len(self._partner)), key=mx.random.key(0))
        at = mx.array(self._PROBES, mx.int32)
        alone = self._rotary(x.reshape(len(self._PROBES), 1, 1, -1), at).reshape(x.shape)
        return bool(mx.array_equal(self(x, at[None]), alone).item())

    def signature(self) -> bytes:
        """Return bytes that are equal for modules that rotate in the same way."""
        cos, sin = self._angles(mx.array([self._PROBES], mx.int32))
        return np.array(mx.concatenate([cos, sin])).tobytes()

    def __call__(self, x: mx.array, offset: int | mx.array) -> mx.array:
        """Rotate x [B, ..., L, D] float32 to L positions; their angles are cached for the next call.

        offset: the first position, as an int for all rows or [B] int32, or all positions [B, L] int32.
        """
        count = x.shape[-2]
        known, known_count = self._at
        both = isinstance(known, int) and isinstance(offset, int)
        if count != known_count or not (known == offset if both else known is offset):
            self._at, self._cos_sin = (offset, count), self._angles(_positions(offset, count))
        cos, sin = self._cos_sin
        if x.ndim != 3:
            cos, sin = (a.reshape(a.shape[0], *(1,) * (x.ndim - 3), *a.shape[1:]) for a in (cos, sin))
        half = self._half
        swapped = mx.concatenate([x[..., half:], x[..., :half]], -1) if half else mx.take(x, self._partner, axis=-1)
        return x * cos + swapped * sin

    def _angles(self, offset: mx.array) -> tuple[mx.array, mx.array]:
        """Return the cosines and sines [B, L, D], for a number and its partner, at positions [B, L]."""
        at = offset.reshape(-1)
        images = self._rotary(mx.broadcast_to(self._units, (at.size, *self._units.shape)), at)
        one, other = (image.reshape(*offset.shape, -1) for image in (images[:, 0], images[:, 1]))
        return mx.where(self._first, one, other), mx.where(self._first, other, one)


def _positions(offset: int | mx.array, count: int) -> mx.array:
    if isinstance(offset, int):
        return mx.arange(offset, offset + count, dtype=mx.int32)[None]
    return offset if offset.ndim == 2 else offset[:, None] + mx.arange(count, dtype=mx.int32)


def _partners(rotary: Rotary, dim: int) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Return each number's partner in the rotation, itself if it does not rotate; None if these are not pairs."""
    images = np.array(rotary(mx.eye(dim)[:, None, None], mx.ones((dim,), mx.int32)))[:, 0, 0]
    elsewhere = (images != 0) & ~np.eye(dim, dtype=bool)
    if elsewhere.sum(axis=1).max() > 1:
        return None
    partner = np.where(elsewhere.any(axis=1), elsewhere.argmax(axis=1), np.arange(dim))
    return partner if np.array_equal(partner[partner], np.arange(dim)) else None
