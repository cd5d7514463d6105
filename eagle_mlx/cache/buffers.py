"""How large the buffers of keys and values are: room for rows to grow, and none for rows that have left."""

from __future__ import annotations

import mlx.core as mx

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
