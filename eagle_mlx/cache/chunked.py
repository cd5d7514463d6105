"""Keys and values of chunked attention: a position sees its own chunk alone."""

from __future__ import annotations

import mlx.core as mx

from eagle_mlx.cache.full import RaggedKV
from eagle_mlx.cache.lengths import RowLengths


class RaggedChunked(RaggedKV):
    """Keys and values of one layer whose positions see those of the same `chunk` positions.

    Such models make their masks of `start_position` and `offset`, as ints: for one row, of known length.
    """

    def __init__(self, lengths: RowLengths, chunk: int):
        super().__init__(lengths)
        self.chunk = chunk

    @property
    def start_position(self) -> int:
        """The first position that is fetched: the start of the chunk that the next position falls into."""
        return self.lengths.upper // self.chunk * self.chunk

    def maybe_trim_front(self) -> None:
        """Nothing to trim: what lies before `start_position` is not fetched."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [1, heads, L, D]; return what lies from `start_position` on."""
        keys, values = super().update_and_fetch(keys, values)
        start = self.start_position
        return (keys[:, :, start:], values[:, :, start:]) if start else (keys, values)
