"""Ragged KV caches: every row of a batch has its own length, and rolling back is arithmetic on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from eagle_mlx.errors import TargetError

STEP = 256
"""Positions by which a buffer grows."""


class RowLengths:
    """The lengths of a batch's rows, shared by the caches of all layers.

    On the device `offset` [B] int32 is exact at all times. On the host `upper` bounds it, for allocation and slicing;
    `uniform` says that every row's length is `upper`, which allows the cheap masks and writes.
    """

    def __init__(self, rows: int):
        self.rows = rows
        self.upper = 0
        self.uniform = True
        self._offset: mx.array | None = None
        self._memo: dict[tuple[str, int], mx.array] = {}

    @property
    def offset(self) -> mx.array:
        """[B] int32, the valid entries of each row."""
        if self._offset is None:
            self._offset = mx.full((self.rows,), self.upper, mx.int32)
        return self._offset

    def advance(self, count: int | mx.array, at_most: int | None = None) -> None:
        """Accept `count` new entries: the same in every row, or [B] int32 of which `at_most` is a bound."""
        self._memo.clear()
        if isinstance(count, int):
            self._offset = None if self.uniform else self.offset + count
            self.upper += count
        else:
            assert at_most is not None
            self._offset = self.offset + count
            self.upper += at_most
            self.uniform = False

    def settle(self, lengths: Sequence[int]) -> None:
        """The host has read the rows' real lengths: tighten the bound."""
        self._memo.clear()
        self.upper = max(lengths, default=0)
        self.uniform = all(length == self.upper for length in lengths)
        if self.uniform:
            self._offset = None

    def save(self) -> tuple[int, bool, mx.array | None]:
        return self.upper, self.uniform, self._offset

    def restore(self, state: tuple[int, bool, mx.array | None]) -> None:
        """Back to a saved state: what was written since is masked now and overwritten later."""
        self._memo.clear()
        self.upper, self.uniform, self._offset = state

    def append(self, other: RowLengths) -> None:
        offset = mx.concatenate([self.offset, other.offset])
        self.uniform = self.uniform and other.uniform and (self.upper == other.upper or not self.rows)
        self._memo.clear()
        self.rows, self.upper = self.rows + other.rows, max(self.upper, other.upper)
        self._offset = None if self.uniform else offset

    def remove(self, row: int) -> None:
        """Drop a row; the last one takes its place."""
        offset = None if self.uniform else without_row(self.offset, row)
        self._memo.clear()
        self.rows -= 1
        self._offset = offset

    def positions(self, count: int) -> mx.array:
        """[B, count] int32: the positions of the next `count` entries of each row."""
        key = ("positions", count)
        if key not in self._memo:
            self._memo[key] = self.offset[:, None] + mx.arange(count)
        return self._memo[key]

    def mask(self, count: int) -> mx.array:
        """[B, 1, count, upper + count] bool: which entries each new position sees."""
        key = ("mask", count)
        if key not in self._memo:
            seen = mx.arange(self.upper + count) <= self.positions(count)[..., None]
            self._memo[key] = seen[:, None]
        return self._memo[key]


class RaggedKV:
    """Keys and values of one attention layer, in mlx-lm's cache protocol.

    Buffers are [R, heads, capacity, D] with R >= rows, so that rows join and leave without moving the others.
    """

    def __init__(self, lengths: RowLengths):
        self.lengths = lengths
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def offset(self) -> int | mx.array:
        """Where the new entries stand, for RoPE: an int where all rows agree, else [B] int32."""
        return self.lengths.upper if self.lengths.uniform else self.lengths.offset

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The attention mask of `count` new positions per row."""
        if window_size is not None and window_size < self.lengths.upper + count:
            raise TargetError("this model uses sliding-window attention over a full cache, which is not supported yet")
        if self.lengths.uniform and not return_array:
            return None if count == 1 else "causal"
        return self.lengths.mask(count)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [B, heads, L, D] behind each row's own length; return what the mask spans, [B, heads, upper + L, D]."""
        rows, count = keys.shape[0], keys.shape[2]
        end = self.lengths.upper + count
        self.keys = self._written(self._room(self.keys, keys, rows, end), keys)
        self.values = self._written(self._room(self.values, values, rows, end), values)
        return self._fetched(self.keys, rows, end), self._fetched(self.values, rows, end)

    @staticmethod
    def _fetched(buffer: mx.array, rows: int, end: int) -> mx.array:
        return buffer if buffer.shape[0] == rows and buffer.shape[2] == end else buffer[:rows, :, :end]

    @staticmethod
    def _room(buffer: mx.array | None, like: mx.array, rows: int, end: int) -> mx.array:
        """The buffer, grown where it lacks rows (by doubling) or positions (by STEP)."""
        _, heads, _, dim = like.shape
        capacity = -(-end // STEP) * STEP
        if buffer is None:
            return mx.zeros((rows, heads, capacity, dim), like.dtype)
        have_rows, _, have, _ = buffer.shape
        if have < end:
            buffer = mx.concatenate([buffer, mx.zeros((have_rows, heads, capacity - have, dim), buffer.dtype)], axis=2)
        if have_rows < rows:
            more = max(rows, 2 * have_rows) - have_rows
            buffer = mx.concatenate([buffer, mx.zeros((more, *buffer.shape[1:]), buffer.dtype)], axis=0)
        return buffer

    def _written(self, buffer: mx.array, new: mx.array) -> mx.array:
        rows, _, count, _ = new.shape
        if self.lengths.uniform:
            buffer[:rows, :, self.lengths.upper : self.lengths.upper + count] = new
            return buffer
        if rows == 1 and buffer.shape[0] == 1:
            return mx.slice_update(buffer, new, self.lengths.offset, axes=(2,))
        where = self.lengths.positions(count)[:, None, :, None]
        spare = buffer.shape[0] - rows
        if spare:  # rows that nobody uses get zeros at their start
            widths = [(0, spare), (0, 0), (0, 0), (0, 0)]
            where, new = mx.pad(where, widths), mx.pad(new, widths)
        return mx.put_along_axis(buffer, mx.broadcast_to(where, new.shape), new, axis=2)

    def append(self, other: RaggedKV) -> None:
        """Take over the other's rows; call before the lengths are joined."""
        if other.keys is None or other.values is None:
            return
        mine, theirs, end = self.lengths.rows, other.lengths.rows, other.lengths.upper
        if not mine:
            self.keys, self.values = other.keys, other.values
            return
        self.keys = self._room(self.keys, other.keys, mine + theirs, max(end, 1))
        self.values = self._room(self.values, other.values, mine + theirs, max(end, 1))
        self.keys[mine : mine + theirs, :, :end] = other.keys[:theirs, :, :end]
        self.values[mine : mine + theirs, :, :end] = other.values[:theirs, :, :end]

    def remove(self, row: int) -> None:
        """Move the last row into the gap; call before the lengths shrink."""
        last = self.lengths.rows - 1
        if self.keys is None or self.values is None or last == 0:
            self.keys = self.values = None
        elif row != last:
            self.keys[row] = self.keys[last]
            self.values[row] = self.values[last]

    @property
    def state(self) -> list[mx.array]:
        return [x for x in (self.keys, self.values) if x is not None]


class RaggedCache(Sequence[RaggedKV]):
    """The caches of all layers of one model for a batch of rows; goes into the model as its `cache`."""

    def __init__(self, layers: int, rows: int):
        self.lengths = RowLengths(rows)
        self.layers = [RaggedKV(self.lengths) for _ in range(layers)]

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: Any) -> Any:
        return self.layers[index]

    def __iter__(self) -> Iterator[RaggedKV]:
        return iter(self.layers)

    def append(self, other: RaggedCache) -> None:
        """The other's rows join behind this one's; no row that is here is copied."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.append(theirs)
        self.lengths.append(other.lengths)

    def remove(self, row: int) -> None:
        """A row leaves; the last one moves into the gap."""
        for layer in self.layers:
            layer.remove(row)
        self.lengths.remove(row)

    @property
    def state(self) -> list[mx.array]:
        return [x for layer in self.layers for x in layer.state]


def check_cacheable(model: nn.Module) -> None:
    """Raise TargetError where a layer keeps something else than plain keys and values."""
    for index, cache in enumerate(make_prompt_cache(model)):
        if type(cache) is not KVCache:
            raise TargetError(
                f"layer {index} of this model keeps a {type(cache).__name__}; "
                "only full attention (KVCache) can be rolled back row by row so far"
            )


def without_row(x: mx.array, row: int) -> mx.array:
    """x [B, ...] without one row, the last one in its place: [B - 1, ...]."""
    last = x.shape[0] - 1
    kept = x[:last]
    if row == last:
        return kept
    return mx.concatenate([kept[:row], x[last:], kept[row + 1 :]], axis=0)
