"""What caches take of memory, worked out from one row's caches before there are others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx

from eagle_mlx.cache.buffers import most_slots
from eagle_mlx.cache.full import RaggedKV
from eagle_mlx.cache.quantized import RaggedQuantized
from eagle_mlx.cache.ragged import RaggedCache
from eagle_mlx.cache.window import RaggedWindow


@dataclass(frozen=True)
class CacheSize:
    """Bytes that the caches of a batch take, by its rows and the longest of them."""

    position: int = 0
    """Of a row and position, over all layers of full attention."""
    windows: tuple[tuple[int, int], ...] = ()
    """For each layer that sees a window: its slots, and the bytes of a row and slot."""
    row: int = 0
    """Of a row, whatever its length: recurrent and convolutional states."""

    @classmethod
    def of(cls, cache: RaggedCache) -> CacheSize:
        """Of caches of one row that has read something, or is about to: shapes are enough, nothing is computed."""
        position, windows, row = 0, [], 0
        for part in cache._parts():
            if isinstance(part, RaggedWindow):
                windows.append((part.ring, _slot_bytes(part.state)))
            elif isinstance(part, (RaggedKV, RaggedQuantized)):
                position += _slot_bytes(part.state)
            else:
                row += sum(x.nbytes for x in part.state)
        return cls(position, tuple(windows), row)

    def nbytes(self, rows: int, longest: int) -> int:
        """The most that so many rows ever take, of which the longest has so many positions."""
        if not rows:
            return 0
        windows = sum(most_slots(rows, min(longest, slots)) * each for slots, each in self.windows)
        return most_slots(rows, longest) * self.position + windows + rows * self.row

    def __add__(self, other: CacheSize) -> CacheSize:
        return CacheSize(self.position + other.position, self.windows + other.windows, self.row + other.row)


def _slot_bytes(buffers: Iterable[mx.array]) -> int:
    """Of one slot of one row, over buffers [1, heads, capacity, D]."""
    return sum(x.nbytes // x.shape[2] for x in buffers)
