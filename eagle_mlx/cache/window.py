"""Caches for sliding-window attention: a ring in which rejected entries never overwrite one that is still visible."""

from __future__ import annotations

from typing import Self

import mlx.core as mx

from eagle_mlx.cache.full import Mask, RaggedKV, gathered, room, scattered
from eagle_mlx.cache.lengths import Moves, RowLengths, ring_positions, swap_removed
from eagle_mlx.errors import TargetError

SLACK = 16  # slots that a ring has beyond its window; a wider forward makes it grow


class RaggedWindow(RaggedKV):
    """Keys and values of one layer that attends to the last `window` positions.

    The entry of position p is in slot p mod `ring`, in a buffer that grows up to `ring` slots. A forward of L positions
    from position p on overwrites entries up to p + L - 1 - ring, and the next query looks back at most window - 1
    positions, even if all are rejected. So with ring >= window + L - 1 no visible entry is ever lost. Whether a row can
    be cut back further depends on the furthest position ever written, rejected or not (`displaced`).
    """

    def __init__(self, lengths: RowLengths, window: int):
        super().__init__(lengths)
        self.window = window
        self.ring = window + SLACK
        self.displaced = [0] * lengths.rows  # for each row, the position from which on no entry has been overwritten

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        window = self.window if window_size is None else window_size
        if window > self.window:
            raise TargetError(f"this model attends to {window} positions in prompts but caches only {self.window}")
        ring = self._ring_for(count)
        if self.lengths.upper + count > ring:
            return self.lengths.mask(count, window, ring)
        return super().make_mask(count, return_array, window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [B, heads, L, D] into the ring; return what the mask covers: the whole ring once it has wrapped."""
        rows, count = keys.shape[0], keys.shape[2]
        self.resize(self._ring_for(count))
        self._displace(count)
        end = self.lengths.upper + count
        if end <= self.ring:
            return super().update_and_fetch(keys, values)
        self.keys = self._written_to_ring(room(self.keys, keys, rows, self.ring, self.ring), keys)
        self.values = self._written_to_ring(room(self.values, values, rows, self.ring, self.ring), values)
        self._fetched = rows, self.ring
        return self.keys_and_values()

    def _displace(self, count: int) -> None:
        ends = (bound + count for bound in self.lengths.bounds)
        self.displaced = [max(old, end - self.ring) for old, end in zip(self.displaced, ends, strict=True)]

    def _moved(self, buffer: mx.array, moves: Moves) -> mx.array:
        return scattered(buffer, gathered(buffer, moves.old % self.ring), moves.new % self.ring)

    def _ring_for(self, count: int) -> int:
        return max(self.ring, self.window + count - 1)

    def _written_to_ring(self, buffer: mx.array, new: mx.array) -> mx.array:
        rows, _, count, _ = new.shape
        start = self.lengths.upper % self.ring
        if self.lengths.uniform and start + count <= self.ring:
            buffer[:rows, :, start : start + count] = new
            return buffer
        return scattered(buffer, new, self.lengths.slots(count, self.ring))

    def compact(self) -> None:
        self.resize(self.window + SLACK)

    def resize(self, ring: int) -> None:
        """Change the ring's size and move the window's entries to their new slots."""
        if ring == self.ring:
            return
        smaller, self.ring, old = min(ring, self.ring), ring, self.ring
        self._displace(0)
        if self.lengths.upper > smaller:
            held = ring_positions(self.lengths.offset - 1, ring) % old
            self.keys, self.values = (x if x is None else gathered(x, held) for x in (self.keys, self.values))

    def zero(self, row: int, start: int = 0) -> None:
        """Zero a row's entries from position `start` on, and none before it."""
        written = range(start, self.displaced[row] + self.ring)
        for buffer in self.state:
            slots = [position % self.ring for position in written if position % self.ring < buffer.shape[2]]
            if slots:
                buffer[row : row + 1, :, mx.array(slots)] = 0

    def _used(self, length: int) -> int:
        return min(length, self.ring)

    @property
    def most(self) -> int:
        return self.ring

    def append(self, other: RaggedKV) -> None:
        assert isinstance(other, RaggedWindow)
        ring = max(self.ring, other.ring) if self.lengths.rows else other.ring
        self.resize(ring)
        other.resize(ring)
        super().append(other)
        self.displaced = [*self.displaced, *other.displaced]

    def remove(self, row: int, last: Self | None) -> None:
        super().remove(row, last)
        self.displaced = swap_removed(self.displaced, row)

    def fork(self, row: int, length: int, lengths: RowLengths) -> Self:
        other = super().fork(row, length, lengths)
        other.displaced = [self.displaced[row]]
        return other

    def shortest(self, row: int) -> int:
        """Return the fewest positions a fork may have so that its whole window is still there."""
        displaced = self.displaced[row]
        return displaced + self.window - 1 if displaced else 0
