"""Caches for full attention with keys and values in 4 or 8 bits."""

from __future__ import annotations

import mlx.core as mx

from eagle_mlx.cache.full import RaggedKV
from eagle_mlx.cache.lengths import Moves, RowLengths
from eagle_mlx.errors import TargetError

GROUPS = (64, 32)
"""Group sizes, in numbers that share a scale and a bias. The first that divides the head width is used."""

Triple = tuple[mx.array, ...]
"""Packed numbers [B, heads, L, D * bits / 32] uint32, scales and biases [B, heads, L, D / group_size]."""


class RaggedQuantized:
    """Keys and values of one attention layer, returned as by mlx-lm's QuantizedKVCache.

    The packed numbers, the scales and the biases are stored as plain keys and values are. Each entry is quantized
    alone, so that a verify writes what plain decoding would have written.
    """

    def __init__(self, lengths: RowLengths, bits: int):
        self.bits, self.group_size = bits, 0
        self.parts = [RaggedKV(lengths) for _ in range(3)]

    @property
    def offset(self) -> int | mx.array:
        return self.parts[0].offset

    @property
    def keys(self) -> mx.array | None:
        """The packed keys. mlx-lm's pipelines make them depend on a rank's send, so that computing them sends."""
        return self.parts[0].keys

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self.parts[0].keys = keys

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        return self.parts[0].make_mask(count, return_array, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Triple, Triple]:
        """Write [B, heads, L, D] after each row's length. Raises TargetError if no group size fits the heads."""
        if not self.group_size:
            self.group_size = _group_size(keys.shape[-1], values.shape[-1])
        quantized = (mx.quantize(x, group_size=self.group_size, bits=self.bits) for x in (keys, values))
        shown = [part.update_and_fetch(k, v) for part, k, v in zip(self.parts, *quantized, strict=True)]
        return tuple(k for k, _ in shown), tuple(v for _, v in shown)

    def keep(self, moves: Moves) -> None:
        for part in self.parts:
            part.keep(moves)

    def append(self, other: RaggedQuantized) -> None:
        self.group_size = self.group_size or other.group_size
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.append(theirs)

    def remove(self, row: int, last: RaggedQuantized | None) -> None:
        for index, part in enumerate(self.parts):
            part.remove(row, None if last is None else last.parts[index])

    def fit(self) -> list[mx.array]:
        return [x for part in self.parts for x in part.fit()]

    def fork(self, row: int, length: int, lengths: RowLengths) -> RaggedQuantized:
        other = RaggedQuantized(lengths, self.bits)
        other.group_size = self.group_size
        other.parts = [part.fork(row, length, lengths) for part in self.parts]
        return other

    def shortest(self, row: int) -> int:
        return self.parts[0].shortest(row)

    def zero(self, row: int, start: int = 0) -> None:
        for part in self.parts:
            part.zero(row, start)

    @property
    def state(self) -> list[mx.array]:
        return [x for part in self.parts for x in part.state]


def _group_size(*widths: int) -> int:
    for size in GROUPS:
        if all(width and width % size == 0 for width in widths):
            return size
    raise TargetError(f"heads of {' and '.join(map(str, widths))} numbers cannot be cut into groups of {GROUPS[-1]}")
