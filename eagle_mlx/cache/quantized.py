"""Caches for full attention with keys and values in 4 or 8 bits."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from eagle_mlx.cache.full import RaggedKV
from eagle_mlx.cache.lengths import RowLengths
from eagle_mlx.cache.recurrent import RaggedList
from eagle_mlx.errors import TargetError

GROUPS = (64, 32)
"""Group sizes, in numbers that share a scale and a bias. The first that divides the head width is used."""

Triple = tuple[mx.array, ...]
"""Packed numbers [B, heads, L, D * bits / 32] uint32, scales and biases [B, heads, L, D / group_size]."""


class RaggedQuantized(RaggedList):
    """Keys and values of one attention layer, returned as by mlx-lm's QuantizedKVCache.

    The packed numbers, the scales and the biases are stored as plain keys and values are. Each entry is quantized
    alone, so that a verify writes what plain decoding would have written.
    """

    def __init__(self, lengths: RowLengths, bits: int):
        super().__init__([RaggedKV(lengths) for _ in range(3)])
        self.bits, self.group_size = bits, 0

    @property
    def offset(self) -> int | mx.array:
        offset: int | mx.array = self.caches[0].offset
        return offset

    @property
    def keys(self) -> mx.array | None:
        """The packed keys. mlx-lm's pipelines make them depend on a rank's send, so that computing them sends."""
        keys: mx.array | None = self.caches[0].keys
        return keys

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self.caches[0].keys = keys

    def make_mask(self, *args: Any, **kwargs: Any) -> mx.array | str | None:
        """Return the mask of `RaggedKV.make_mask`."""
        mask: mx.array | str | None = self.caches[0].make_mask(*args, **kwargs)
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Triple, Triple]:
        """Write [B, heads, L, D] after each row's length. Raises TargetError if no group size fits the heads."""
        if not self.group_size:
            widths = keys.shape[-1], values.shape[-1]
            self.group_size = next((size for size in GROUPS if all(w and not w % size for w in widths)), 0)
            if not self.group_size:
                sizes = " and ".join(map(str, widths))
                raise TargetError(f"heads of {sizes} numbers do not divide into quantization groups of {GROUPS[-1]}")
        quantized = (mx.quantize(x, group_size=self.group_size, bits=self.bits) for x in (keys, values))
        shown = [part.update_and_fetch(k, v) for part, k, v in zip(self.caches, *quantized, strict=True)]
        return tuple(k for k, _ in shown), tuple(v for _, v in shown)

    def append(self, other: RaggedList) -> None:
        assert isinstance(other, RaggedQuantized)
        self.group_size = self.group_size or other.group_size
        super().append(other)
