"""Full attention: keys and values of every position, row by row, in buffers that rows grow into."""

from __future__ import annotations

from copy import copy
from typing import Self

import mlx.core as mx

from eagle_mlx.cache.lengths import Moves, RowLengths
from eagle_mlx.cpu import use_shortcuts

STEP = 256
"""Positions by which a buffer grows at least, as mlx-lm's own caches do."""
_GROWTH = 8
"""A buffer is made an eighth longer than it must be, in whole steps.

A text of n tokens has then copied about 8 n entries to get there, and read n²/2 of them.
"""
_MOST = 1.3
"""A buffer is made anew where rows leave and it has so many times the slots in use, and STEP a row.

With the eighth to grow into, one row of eight can leave and another join without a copy.
"""


def capacity(slots: int) -> int:
    """Slots of a buffer that is made for so many."""
    return (-(-slots // STEP) + slots // _GROWTH // STEP) * STEP


def most_slots(rows: int, slots: int) -> int:
    """The most slots that a buffer for so many rows of so many slots may have, over all rows."""
    return int(rows * (_MOST * slots + STEP))


def room(buffer: mx.array | None, like: mx.array, rows: int, slots: int, most: int | None = None) -> mx.array:
    """A buffer [R, heads, capacity, D] with R >= rows and capacity >= slots: this one, or a longer copy of it.

    A copy has as many rows as are asked for, so that there are never more than rows that decode at once. `most`: slots
    that are never exceeded.
    """
    have_rows, _, have, _ = buffer.shape if buffer is not None else (0, 0, 0, 0)
    if rows <= have_rows and slots <= have:
        assert buffer is not None
        return buffer
    length = max(slots, capacity(slots) if most is None else min(capacity(slots), most))
    if buffer is None:
        _, heads, _, dim = like.shape
        return mx.zeros((rows, heads, length, dim), like.dtype)
    return _resized(buffer, rows, length)


def fit(buffer: mx.array, rows: int, slots: int, most: int | None = None) -> mx.array:
    """The buffer, or a shorter copy where rows have left and it holds more than `most_slots` for those that stay."""
    if buffer.shape[0] * buffer.shape[2] <= most_slots(rows, slots):
        return buffer
    return _resized(buffer, rows, capacity(slots) if most is None else min(capacity(slots), most))


def _resized(buffer: mx.array, rows: int, slots: int) -> mx.array:
    """A copy [rows, heads, slots, D] of what both have, zeros elsewhere."""
    both = buffer[:rows, :, :slots]
    more_rows, more_slots = rows - both.shape[0], slots - both.shape[2]
    if not more_rows and not more_slots:
        return copied(both)
    return mx.pad(both, [(0, more_rows), (0, 0), (0, more_slots), (0, 0)])


def copied(x: mx.array) -> mx.array:
    """A copy that shares no memory; a slice alone may keep the whole array that it was cut from."""
    return x * 1


class RaggedKV:
    """Keys and values of one attention layer, in mlx-lm's cache protocol.

    Buffers are [R, heads, capacity, D] with R >= rows, so that a row can leave and another join without moving the
    others. Where many leave, or the longest, the buffers are made anew for those that stay (`fit`).
    """

    def __init__(self, lengths: RowLengths):
        self.lengths = lengths
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._fetched = 0, 0

    @property
    def offset(self) -> int | mx.array:
        """Where the new entries stand, for RoPE: an int where all rows agree, else [B] int32; [B, L] in a tree."""
        if self.lengths.branches is not None:
            return self.lengths.places(self.lengths.branches.count)
        return self.lengths.upper if self.lengths.uniform else self.lengths.offset

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The attention mask of `count` new positions per row."""
        if window_size is not None and window_size < self.lengths.upper + count:
            return self.lengths.mask(count, window_size)
        if self.lengths.uniform and not return_array and self.lengths.branches is None:
            if count == 1:
                return None
            if not use_shortcuts():  # where every layer would make this mask for itself
                return "causal"
        return self.lengths.mask(count)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [B, heads, L, D] behind each row's own length; return what the mask spans, [B, heads, upper + L, D]."""
        rows, count = keys.shape[0], keys.shape[2]
        end = self.lengths.upper + count
        self.keys = self._written(room(self.keys, keys, rows, end, self._most), keys)
        self.values = self._written(room(self.values, values, rows, end, self._most), values)
        self._fetched = rows, end
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What `update_and_fetch` last returned, for layers that share it."""
        assert self.keys is not None
        assert self.values is not None
        return fetched(self.keys, *self._fetched), fetched(self.values, *self._fetched)

    def _written(self, buffer: mx.array, new: mx.array) -> mx.array:
        rows, _, count, _ = new.shape
        if self.lengths.uniform:
            buffer[:rows, :, self.lengths.upper : self.lengths.upper + count] = new
            return buffer
        if rows == 1 and buffer.shape[0] == 1:
            return mx.slice_update(buffer, new, self.lengths.offset, axes=(2,))
        return scattered(buffer, new, self.lengths.positions(count))

    def keep(self, moves: Moves) -> None:
        """Move entries of a tree together."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (self._moved(x, moves) for x in (self.keys, self.values))

    def _moved(self, buffer: mx.array, moves: Moves) -> mx.array:
        if buffer.shape[0] == 1:
            start, end = moves.start, moves.start + moves.new.shape[1]
            buffer[:, :, start:end] = mx.take(buffer, moves.old_of_first, axis=2)
            return buffer
        moving = mx.take_along_axis(buffer[: moves.old.shape[0]], moves.old[:, None, :, None], axis=2)
        return scattered(buffer, moving, moves.new)

    def append(self, other: RaggedKV) -> None:
        """Take over the other's rows; call before the lengths are joined.

        The rest of their slots is zeroed: a row that has left may have kept entries there that are not numbers.
        """
        mine, theirs = self.lengths.rows, other.lengths.rows
        if not mine:
            self.keys, self.values = other.keys, other.values
            return
        # Where one side has read nothing yet, its rows still need a place to move from.
        like_keys, like_values = self._like(other)
        if like_keys is None or like_values is None:
            return
        end = self._used(other.lengths.upper)
        slots = max(1, end, self._used(self.lengths.upper))
        self.keys = room(self.keys, like_keys, mine + theirs, slots, self._most)
        self.values = room(self.values, like_values, mine + theirs, slots, self._most)
        if other.keys is not None and other.values is not None:
            self.keys[mine : mine + theirs, :, :end] = other.keys[:theirs, :, :end]
            self.values[mine : mine + theirs, :, :end] = other.values[:theirs, :, :end]
        self._zero(slice(mine, mine + theirs), end if other.keys is not None else 0)

    def _like(self, other: RaggedKV) -> tuple[mx.array | None, mx.array | None]:
        """Keys and values of the shape of either's."""
        return (self.keys, self.values) if other.keys is None else (other.keys, other.values)

    def _used(self, length: int) -> int:
        """Slots that rows of at most this length have entries in."""
        return length

    @property
    def _most(self) -> int | None:
        """Slots that a buffer never has a use for more of."""
        return None

    def fit(self) -> list[mx.array]:
        """Give up the room of rows that have left, where it is much; the buffers that were made for it."""
        if self.keys is None or self.values is None:
            return []
        before, slots = (self.keys, self.values), max(1, self._used(self.lengths.upper))
        self.keys = fit(self.keys, self.lengths.rows, slots, self._most)
        self.values = fit(self.values, self.lengths.rows, slots, self._most)
        return [new for old, new in zip(before, (self.keys, self.values), strict=True) if new is not old]

    def remove(self, row: int, last: Self | None) -> None:
        """Let a row go; `last` is a fork of the last row, which moves into the gap, or None where that is the row."""
        if self.keys is None or self.values is None or self.lengths.rows == 1:
            self.keys = self.values = None
        elif last is not None and last.keys is not None and last.values is not None:
            used = last.keys.shape[2]
            self.keys[row : row + 1, :, :used] = last.keys
            self.values[row : row + 1, :, :used] = last.values
            self._zero(slice(row, row + 1), used)  # a round that was never read may have written behind it

    def fork(self, row: int, length: int, lengths: RowLengths) -> Self:
        """The first `length` positions of one row, in arrays of their own; `lengths` are those of the new cache."""
        other = copy(self)
        other.lengths, slots = lengths, self._used(length)
        if self.keys is not None and self.values is not None:
            other.keys, other.values = (copied(x[row : row + 1, :, :slots]) for x in (self.keys, self.values))
        return other

    def shortest(self, row: int) -> int:
        """The fewest positions that a fork of a row may hold: any, because all entries stay where they are."""
        return 0

    def zero(self, row: int, start: int = 0) -> None:
        """Forget what a row holds that nobody may see, even multiplied by nothing: entries that are not numbers."""
        self._zero(slice(row, row + 1), start)

    def _zero(self, rows: slice, start: int) -> None:
        """Zero the slots of some rows from `start` on."""
        if self.keys is not None and self.values is not None and start < self.keys.shape[2]:
            self.keys[rows, :, start:], self.values[rows, :, start:] = 0, 0

    @property
    def state(self) -> list[mx.array]:
        return [x for x in (self.keys, self.values) if x is not None]


class RaggedGrouped(RaggedKV):
    """The same for layers that group the heads of queries by hand: their masks have one axis more."""

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """None, or [B, 1, 1, count, upper + count] bool."""
        mask = super().make_mask(count, return_array, window_size)
        return mask[:, :, None] if isinstance(mask, mx.array) else mask


def fetched(buffer: mx.array, rows: int, end: int) -> mx.array:
    """The rows in use and their first `end` slots: [rows, heads, end, D]."""
    return buffer if buffer.shape[0] == rows and buffer.shape[2] == end else buffer[:rows, :, :end]


def scattered(buffer: mx.array, new: mx.array, slots: mx.array) -> mx.array:
    """The buffer [R, heads, capacity, D] with new [B, heads, L, D] in each row's own slots [B, L]."""
    where = slots[:, None, :, None]
    spare = buffer.shape[0] - new.shape[0]
    if spare:  # rows that nobody uses get zeros at their start
        widths = [(0, spare), (0, 0), (0, 0), (0, 0)]
        where, new = mx.pad(where, widths), mx.pad(new, widths)
    return mx.put_along_axis(buffer, mx.broadcast_to(where, new.shape), new, axis=2)


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
