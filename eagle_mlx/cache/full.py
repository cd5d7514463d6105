"""Caches for full attention: growing buffers of keys and values, row by row; also quantized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Self

import mlx.core as mx

from eagle_mlx.cache.lengths import Moves, RowLengths
from eagle_mlx.cpu import use_shortcuts
from eagle_mlx.errors import TargetError
from eagle_mlx.hooks import CallListener, Projections

STEP = 256  # the smallest step by which a buffer grows, in positions, as in mlx-lm's caches
_GROWTH = 8
"""New buffers are an eighth larger than needed: growing to n tokens then copies only about 8 n entries in all."""
_MOST = 1.3
"""When rows leave, a buffer is copied if it has more than this many times the slots in use, plus STEP per row: one row
of eight can leave and another join without a copy."""

GROUP_SIZES = (64, 32)
"""Numbers that share a scale and a bias in a quantized cache. The first that divides the head width is used."""

Mask = mx.array | str | None
Triple = tuple[mx.array, ...]
"""Packed numbers [B, heads, L, D * bits / 32] uint32, scales and biases [B, heads, L, D / group_size]."""


def capacity(slots: int) -> int:
    """Return the number of slots to allocate for `slots` positions."""
    return (-(-slots // STEP) + slots // _GROWTH // STEP) * STEP


def most_slots(rows: int, slots: int) -> int:
    """Return the most slots, over all rows, that a buffer for `rows` rows of `slots` positions may have."""
    return int(rows * (_MOST * slots + STEP))


def room(buffer: mx.array | None, like: mx.array, rows: int, slots: int, most: int | None = None) -> mx.array:
    """Return a buffer [R >= rows, heads, >= slots, D]: this one, or a copy with R = rows and at most `most` slots."""
    if buffer is not None and rows <= buffer.shape[0] and slots <= buffer.shape[2]:
        return buffer
    length = max(slots, capacity(slots) if most is None else min(capacity(slots), most))
    if buffer is None:
        _, heads, _, dim = like.shape
        return mx.zeros((rows, heads, length, dim), like.dtype)
    return _resized(buffer, rows, length)


def shrunk(buffer: mx.array, rows: int, slots: int, most: int | None = None) -> mx.array:
    """Return the buffer, or a smaller copy if it has more than `most_slots` for the rows in use."""
    if buffer.shape[0] * buffer.shape[2] <= most_slots(rows, slots):
        return buffer
    return _resized(buffer, rows, capacity(slots) if most is None else min(capacity(slots), most))


def _resized(buffer: mx.array, rows: int, slots: int) -> mx.array:
    both = buffer[:rows, :, :slots]
    more_rows, more_slots = rows - both.shape[0], slots - both.shape[2]
    if not more_rows and not more_slots:
        return copied(both)
    return mx.pad(both, [(0, more_rows), (0, 0), (0, more_slots), (0, 0)])


def copied(x: mx.array) -> mx.array:
    """Return a copy that shares no memory; a slice may keep alive the whole array that it was cut from."""
    return x * 1


class RaggedKV:
    """Keys and values of one attention layer, in mlx-lm's cache protocol. Buffers are [R, heads, capacity, D] with R >=
    rows, so that a row can leave or join without moving the others."""

    def __init__(self, lengths: RowLengths):
        self.lengths = lengths
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._fetched = 0, 0

    @property
    def offset(self) -> int | mx.array:
        """The position of the new entries, for RoPE: an int if all rows agree, else [B] int32; [B, L] in a tree."""
        if self.lengths.branches is not None:
            return self.lengths.places(self.lengths.branches.count)
        return self.lengths.rotary

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Return the attention mask of `count` new positions per row."""
        if window_size is not None and window_size < self.lengths.upper + count:
            return self.lengths.mask(count, window_size)
        special = return_array or self.lengths.blocks or self.lengths.branches is not None
        if self.lengths.uniform and not special:
            if count == 1:
                return None
            if not use_shortcuts():  # otherwise tiles of a prompt are cut from an array
                return "causal"
        return self.lengths.mask(count)

    def seen(self, count: int) -> mx.array | None:
        """Return the entries that a draft window shows to the next `count` positions; None for all."""
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [B, heads, L, D] after each row's length; return all that the mask covers, [B, heads, upper + L, D]."""
        rows, count = keys.shape[0], keys.shape[2]
        end = self.lengths.upper + count
        self.keys = self._written(room(self.keys, keys, rows, end, self.most), keys)
        self.values = self._written(room(self.values, values, rows, end, self.most), values)
        self._fetched = rows, end
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the last result of `update_and_fetch`, for layers that share it."""
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
        """Move a tree's accepted entries next to one another."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (self._moved(x, moves) for x in (self.keys, self.values))

    def _moved(self, buffer: mx.array, moves: Moves) -> mx.array:
        if buffer.shape[0] == 1:
            start, end = moves.start, moves.start + moves.new.shape[1]
            buffer[:, :, start:end] = mx.take(buffer, moves.old[0], axis=2)
            return buffer
        return scattered(buffer, gathered(buffer, moves.old), moves.new)

    def append(self, other: RaggedKV) -> None:
        """Append the other's rows, before `lengths.append`. Slots after them are zeroed: they may hold a row's NaN."""
        mine, theirs = self.lengths.rows, other.lengths.rows
        if not mine:
            self.keys, self.values = other.keys, other.values
            return
        like = self if other.keys is None else other  # rows of an empty side need slots too
        if like.keys is None or like.values is None:
            return
        end = self._used(other.lengths.upper) if other.state else 0
        slots = max(1, end, self._used(self.lengths.upper))
        self.keys = room(self.keys, like.keys, mine + theirs, slots, self.most)
        self.values = room(self.values, like.values, mine + theirs, slots, self.most)
        for buffer, new in zip(self.state, other.state, strict=False):
            buffer[mine : mine + theirs, :, :end] = new[:theirs, :, :end]
        self._zero(slice(mine, mine + theirs), end)

    def _used(self, length: int) -> int:
        return length

    @property
    def most(self) -> int | None:
        """The most slots that a buffer can use; None if there is no limit."""
        return None

    def fit(self) -> list[mx.array]:
        """Free the memory of rows that left, if it is worth a copy; return the new buffers."""
        before, slots = self.state, max(1, self._used(self.lengths.upper))
        if before:
            self.keys, self.values = (shrunk(x, self.lengths.rows, slots, self.most) for x in before)
        return [new for old, new in zip(before, self.state, strict=True) if new is not old]

    def remove(self, row: int, last: Self | None) -> None:
        """Remove a row. `last`: a fork of the last row, which moves into the gap; None if `row` is the last."""
        if self.keys is None or self.values is None or self.lengths.rows == 1:
            self.keys = self.values = None
        elif last is not None and last.keys is not None and last.values is not None:
            used = last.keys.shape[2]
            self.keys[row : row + 1, :, :used] = last.keys
            self.values[row : row + 1, :, :used] = last.values
            self._zero(slice(row, row + 1), used)  # a round that was not collected may have written past the end

    def fork(self, row: int, length: int, lengths: RowLengths) -> Self:
        """Copy the first `length` positions of one row into a new cache with `lengths`."""
        other = copy(self)
        other.lengths, slots = lengths, self._used(length)
        if self.keys is not None and self.values is not None:
            other.keys, other.values = (copied(x[row : row + 1, :, :slots]) for x in (self.keys, self.values))
        return other

    def shortest(self, row: int) -> int:
        """Return the fewest positions a fork of a row may have: here 0, because entries stay where they are."""
        return 0

    def zero(self, row: int, start: int = 0) -> None:
        """Zero a row from `start` on: NaN in a masked entry would still reach the output."""
        self._zero(slice(row, row + 1), start)

    def _zero(self, rows: slice, start: int) -> None:
        for buffer in self.state:
            if start < buffer.shape[2]:
                buffer[rows, :, start:] = 0

    @property
    def state(self) -> list[mx.array]:
        return [x for x in (self.keys, self.values) if x is not None]


class RaggedGrouped(RaggedKV):
    """A cache for layers that group query heads themselves: their masks have one more axis."""

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Return None or a mask [B, 1, 1, count, upper + count] bool."""
        mask = super().make_mask(count, return_array, window_size)
        return mask[:, :, None] if isinstance(mask, mx.array) else mask


def fetched(buffer: mx.array, rows: int, end: int) -> mx.array:
    """Return the rows in use and their first `end` slots: [rows, heads, end, D]."""
    return buffer if buffer.shape[0] == rows and buffer.shape[2] == end else buffer[:rows, :, :end]


def gathered(buffer: mx.array, slots: mx.array) -> mx.array:
    """Return the entries in each row's slots [B, L] of a buffer [R, heads, capacity, D], its last for slots past it."""
    inside = mx.minimum(slots, buffer.shape[2] - 1)[:, None, :, None]
    return mx.take_along_axis(buffer[: slots.shape[0]], inside, axis=2)


def scattered(buffer: mx.array, new: mx.array, slots: mx.array) -> mx.array:
    """Write `new` [B, heads, L, D] into each row's slots [B, L] of a buffer [R, heads, capacity, D]; return it."""
    where = slots[:, None, :, None]
    spare = buffer.shape[0] - new.shape[0]
    if spare:  # unused rows get zeros at their start
        widths = [(0, spare), (0, 0), (0, 0), (0, 0)]
        where, new = mx.pad(where, widths), mx.pad(new, widths)
    return mx.put_along_axis(buffer, mx.broadcast_to(where, new.shape), new, axis=2)


class RaggedChunked(RaggedKV):
    """Keys and values of one layer with chunked attention: a position attends only within its chunk. Such models build
    their masks from `start_position` and `offset`, which must be ints: for one row, of known length."""

    def __init__(self, lengths: RowLengths, chunk: int):
        super().__init__(lengths)
        self.chunk = chunk

    @property
    def start_position(self) -> int:
        """The first position returned: the start of the chunk of the next position."""
        return self.lengths.upper // self.chunk * self.chunk

    def maybe_trim_front(self) -> None:
        """Do nothing: positions before `start_position` are never returned."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [1, heads, L, D]; return the entries from `start_position` on."""
        keys, values = super().update_and_fetch(keys, values)
        start = self.start_position
        return (keys[:, :, start:], values[:, :, start:]) if start else (keys, values)


class RaggedList(CallListener):
    """Several caches of one layer, like mlx-lm's CacheList. `RaggedCache` changes the caches themselves."""

    def __init__(self, caches: Sequence[Any]):
        self.caches = tuple(caches)

    @property
    def parts(self) -> list[Any]:
        return [part for cache in self.caches for part in (cache.parts if isinstance(cache, RaggedList) else [cache])]

    def __getitem__(self, index: int) -> Any:
        return self.caches[index]

    def note(self, layer: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Projections | None:
        listener = next((cache for cache in self.caches if isinstance(cache, CallListener)), None)
        return listener.note(layer, args, kwargs) if listener is not None else None

    def fork(self, row: int, length: int, lengths: RowLengths) -> Self:
        other = copy(self)
        other.caches = tuple(cache.fork(row, length, lengths) for cache in self.caches)
        return other


class RaggedQuantized(RaggedList):
    """Keys and values of one attention layer, returned as by mlx-lm's QuantizedKVCache.

    The packed numbers, the scales and the biases are stored as plain keys and values are. Each entry is quantized
    alone, so that a verify writes what plain decoding would have written.
    """

    caches: tuple[RaggedKV, ...]

    def __init__(self, lengths: RowLengths, bits: int):
        super().__init__([RaggedKV(lengths) for _ in range(3)])
        self.bits, self.group_size = bits, GROUP_SIZES[0]

    @property
    def offset(self) -> int | mx.array:
        return self.caches[0].offset

    @property
    def keys(self) -> mx.array | None:
        """The packed keys. mlx-lm's pipelines make them depend on a rank's send, so that computing them sends."""
        return self.caches[0].keys

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self.caches[0].keys = keys

    def make_mask(self, *args: Any, **kwargs: Any) -> Mask:
        return self.caches[0].make_mask(*args, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Triple, Triple]:
        """Write [B, heads, L, D] after each row's length. Raises TargetError if no group size fits the heads."""
        widths = keys.shape[-1], values.shape[-1]
        self.group_size = next((size for size in GROUP_SIZES if all(w and not w % size for w in widths)), 0)
        if not self.group_size:
            sizes, least = " and ".join(map(str, widths)), GROUP_SIZES[-1]
            raise TargetError(f"heads of {sizes} numbers do not divide into quantization groups of {least}")
        quantized = (mx.quantize(x, group_size=self.group_size, bits=self.bits) for x in (keys, values))
        shown = [part.update_and_fetch(k, v) for part, k, v in zip(self.caches, *quantized, strict=True)]
        return tuple(k for k, _ in shown), tuple(v for _, v in shown)
