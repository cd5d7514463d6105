"""RoPE angles, computed once per forward: on a CPU, RoPE is about twenty operations in every layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.cpu.shortcuts import use_shortcuts


class RopeCache:
    """The angles of one forward's positions, for all layers whose RoPE rotates halves of a vector alike."""

    def __init__(self) -> None:
        self._cos_sin: dict[Any, tuple[mx.array, mx.array, Any]] | None = None

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Within the block, which calls a model once, share angles if that is faster."""
        self._cos_sin = {} if use_shortcuts() else None
        try:
            yield
        finally:
            self._cos_sin = None

    def rotated(self, rope: nn.Module, plain: Any, x: mx.array, offset: Any) -> mx.array | None:
        """Return x [B, H, L, D] rotated as by `plain(x, offset)`, bit for bit; None if angles are not shared.

        offset: an int or [B] int32.
        """
        if self._cos_sin is None or not isinstance(rope, nn.RoPE) or rope.traditional or x.dtype != mx.float32:
            return None
        half = x.shape[-1] // 2
        if x.ndim != 4 or rope.dims != 2 * half or (isinstance(offset, mx.array) and not offset.ndim):
            return None
        key = rope.base, rope.scale, half, x.shape[2], offset if isinstance(offset, int) else id(offset)
        if key not in self._cos_sin:  # the image of (1, 0) under a rotation is (cos, sin)
            unit = (mx.arange(2 * half) < half).astype(mx.float32)
            rows = 1 if isinstance(offset, int) else offset.shape[0]
            cos, sin = mx.split(plain(mx.broadcast_to(unit, (rows, 1, *x.shape[2:])), offset), 2, axis=-1)
            self._cos_sin[key] = mx.concatenate([cos, cos], -1), mx.concatenate([-sin, sin], -1), offset
        cos, sin, _ = self._cos_sin[key]
        return x * cos + mx.concatenate([x[..., half:], x[..., :half]], -1) * sin
