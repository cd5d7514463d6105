"""The length of each row of a batch, and the attention masks that follow from the lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx

from eagle_mlx.decoding.draft import Branches

_T = TypeVar("_T")


@dataclass(frozen=True)
class Moves:
    """Cache entries to move, the same number in each row."""

    old: mx.array  # [B, D] int32
    new: mx.array  # [B, D] int32, consecutive in each row
    start: int  # the first row's first new position

    @classmethod
    def of(cls, kept: Sequence[Sequence[int]], starts: Sequence[int]) -> Moves | None:
        """Return the moves that put a tree's accepted entries where a chain's would be; None if they already are. kept:
        each row's accepted draft tokens, numbered from 0; starts: the position of the token above each tree."""
        depth = max(map(len, kept), default=0)
        paths = [[*nodes, *range(len(nodes), depth)] for nodes in kept]
        right = next((place for place in range(depth) if any(path[place] != place for path in paths)), depth)
        if right == depth:
            return None
        old = [[start + 1 + node for node in path[right:]] for path, start in zip(paths, starts, strict=True)]
        new = [[start + 1 + place for place in range(right, depth)] for start in starts]
        return cls(mx.array(old, mx.int32), mx.array(new, mx.int32), new[0][0])


SavedLengths = tuple[int, list[int], bool, mx.array | None]  # `upper`, `bounds`, `uniform` and `offset`


class RowLengths:
    """The lengths of a batch's rows, shared by the caches of all layers.

    On the device, `offset` [B] int32 is always exact. On the host, `bounds` has an upper bound for each row and `upper`
    one for all rows. If `uniform`, every row's length is `upper`, which allows cheaper masks and writes.
    """

    def __init__(self, rows: int):
        self.rows, self.upper = rows, 0
        self.bounds = [0] * rows
        self.uniform = True
        self.valid: mx.array | None = None
        """[B] int32: each row's real entries in the next forward, if they are known beforehand and differ."""
        self.branches: Branches | None = None  # the tree of the next forward's positions; None if they are a chain
        self.blocks: Sequence[tuple[int, int]] = ()
        """Positions of the next forward, from and to, that all see one another: images. For a single row."""
        self.shifts = [0] * rows  # how far each row's positions for RoPE are from its entries' own (`shift`)
        self.dropped = [0] * rows  # each row's entries that were removed after its sink; its later positions count them
        self.drafted: int | None = None  # entries that the current draft has written; None outside of drafts
        self._offset: mx.array | None = None
        self._shift: mx.array | None = None  # `shifts` on the device; None if all are 0
        self._memo: dict[tuple[str | int, ...], mx.array] = {}

    @property
    def offset(self) -> mx.array:
        """[B] int32, the number of valid entries in each row."""
        if self._offset is None:
            self._offset = mx.full((self.rows,), self.upper, mx.int32)
        return self._offset

    def expect(self, valid: mx.array) -> None:
        """Set which of the next forward's positions are real: the first valid [B] int32 of each row."""
        self._memo.clear()
        self.valid = valid

    def see_blocks(self, blocks: Sequence[tuple[int, int]]) -> None:
        self._memo.clear()
        self.blocks = blocks

    def branch(self, branches: Branches) -> None:
        self._memo.clear()
        self.branches = branches

    def advance(self, count: int | mx.array, at_most: int | None = None) -> None:
        """Accept `count` new entries: an int for all rows, or [B] int32 with `at_most` as upper bound."""
        self._memo.clear()
        self.valid = self.branches = None
        self.blocks = ()
        self.uniform = self.uniform and isinstance(count, int)
        self._offset = None if self.uniform else self.offset + count
        most = count if isinstance(count, int) else at_most
        assert most is not None
        self.drafted = None if self.drafted is None else self.drafted + most
        self.upper += most
        self.bounds = [bound + most for bound in self.bounds]

    def sync(self, lengths: Sequence[int]) -> None:
        """Set the exact lengths, which the host now knows."""
        self._memo.clear()
        self.bounds = list(lengths)
        self.upper = max(lengths, default=0)
        self.uniform = all(length == self.upper for length in lengths)
        if self.uniform:
            self._offset = None

    def shift(self, shifts: Sequence[int]) -> None:
        """Set how far later positions for RoPE are from their entries' own: images take fewer than they have tokens."""
        self._memo.clear()
        self.shifts = list(shifts)
        self._shift = mx.array(self.shifts, mx.int32) if any(shifts) else None

    @property
    def rotary(self) -> int | mx.array:
        """The position of the new entries for RoPE: an int if all rows agree, else [B] int32."""
        if (shift := self._shift) is None:
            return self.upper if self.uniform else self.offset
        return self._once(("rotary",), lambda: self.offset + shift)

    def drop(self, counts: Sequence[int]) -> None:
        """Remove `counts` entries of each row, whose exact lengths the host knows. Positions stay as they are."""
        self.dropped = [old + count for old, count in zip(self.dropped, counts, strict=True)]
        lengths = [bound - count for bound, count in zip(self.bounds, counts, strict=True)]
        self._offset = mx.array(lengths, mx.int32)
        self.sync(lengths)

    def save(self) -> SavedLengths:
        return self.upper, self.bounds, self.uniform, self._offset

    def begin_draft(self) -> SavedLengths:
        """Return the lengths to restore after a draft. A draft window ends at these lengths until then."""
        self._memo.clear()
        self.drafted = 0
        return self.save()

    def restore(self, state: SavedLengths) -> None:
        """Return to saved lengths; later entries are masked and will be overwritten."""
        self._memo.clear()
        self.branches = self.drafted = None
        self.upper, self.bounds = state[:2]
        self.uniform, self._offset = state[2:]

    def append(self, other: RowLengths) -> None:
        self._memo.clear()
        offset = mx.concatenate([self.offset, other.offset])
        self.uniform = self.uniform and other.uniform and (self.upper == other.upper or not self.rows)
        self.rows, self.upper = self.rows + other.rows, max(self.upper, other.upper)
        self.bounds, self.dropped = [*self.bounds, *other.bounds], [*self.dropped, *other.dropped]
        self.shift([*self.shifts, *other.shifts])
        self._offset = None if self.uniform else offset

    def remove(self, row: int) -> None:
        """Remove a row; the last row takes its place."""
        self._memo.clear()
        self._offset = None if self.uniform else without_row(self.offset, row)
        self.rows -= 1
        self.bounds, self.dropped = swap_removed(self.bounds, row), swap_removed(self.dropped, row)
        self.upper = max(self.bounds, default=0)
        self.shift(swap_removed(self.shifts, row))

    def _once(self, key: tuple[str | int, ...], compute: Callable[[], mx.array]) -> mx.array:
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]

    def places(self, count: int) -> mx.array:
        """Return the next `count` positions of each row, [B, count] int32; always the same array within a forward."""
        tree = self.branches
        if tree is None:
            return self.positions(count)
        start = self.upper if self.uniform else self.offset[:, None]
        return self._once(("places",), lambda: start - tree.before + tree.asking)

    def positions(self, count: int) -> mx.array:
        """Return the next `count` positions of each row as for a chain, [B, count] int32."""
        return self._once(("positions", count), lambda: self.offset[:, None] + mx.arange(count))

    def slots(self, count: int, size: int) -> mx.array:
        """Return the ring slots of the next `count` entries of each row, [B, count] int32."""
        return self._once(("slots", count, size), lambda: self.positions(count) % size)

    def mask(self, count: int, window: int | None = None, ring: int | None = None) -> mx.array:
        """Return which entries each new position sees, [B, 1, count, S] bool: at most the last `window`. S is upper +
        count, or the size of a `ring`, in which position p is in slot p mod S."""

        def compute() -> mx.array:
            tree, queries = self.branches, self.places(count)[..., None]
            if tree is not None and self.uniform and window is None:  # each node sees the text and its own branch
                text = mx.ones((self.rows, tree.count, self.upper - tree.before), mx.bool_)
                return mx.concatenate([text, tree.seen], axis=-1)[:, None]
            keys = mx.arange(self.upper + count)[None]
            if ring is not None:
                keys = ring_positions(self.offset + (count - 1), ring)
            if tree is not None:
                return self._tree_mask(keys, queries, window, tree, ring or self.upper + count)
            seen = keys[:, None] <= queries
            if window is not None:
                seen = seen & (keys[:, None] > queries - window)
            for start, end in self.blocks:
                seen = seen | ((start <= queries) & (queries < end) & ((start <= keys) & (keys < end))[:, None])
            return (seen if ring is None else seen & (keys >= 0)[:, None])[:, None]

        return self._once(("mask", count, window or 0, ring or 0), compute)

    def _tree_mask(self, keys: mx.array, queries: mx.array, window: int | None, tree: Branches, size: int) -> mx.array:
        """Return the mask of a tree, [B, 1, L, S] bool, for keys at [B or 1, S] and queries at [B, L, 1] int32."""
        start = self.offset - tree.before
        text = (keys >= 0) & (keys < start[:, None])
        seen = mx.broadcast_to(text[:, None], (self.rows, tree.count, keys.shape[-1]))
        own = tree.seen
        if window is not None:
            seen = seen & (keys[:, None] > queries - window)
            own = own & (tree.asking[..., None] - tree.depths[:, None] < window)
        slots = (start[:, None] + mx.arange(own.shape[-1])) % size
        return mx.put_along_axis(seen, mx.broadcast_to(slots[:, None], own.shape), own, axis=-1)[:, None]

    def valid_mask(self, count: int) -> mx.array | None:
        """Return which of the next forward's entries are real, [B, count] bool; None if all of them certainly are."""
        if self.valid is None and count == 1:
            return None
        valid = mx.array([count]) if self.valid is None else self.valid
        return self._once(
            ("valid", count), lambda: mx.broadcast_to(mx.arange(count) < valid[:, None], (self.rows, count))
        )


def ring_positions(newest: mx.array, size: int) -> mx.array:
    """Return the position in each slot of a ring, [B, size] int32, below 0 if unused. newest: [B] int32."""
    return newest[:, None] - (newest[:, None] - mx.arange(size)) % size


def swap_removed(values: Sequence[_T], row: int) -> list[_T]:
    """Remove one row's value; the last value takes its place."""
    last = len(values) - 1
    return [values[last if index == row else index] for index in range(last)]


def without_row(x: mx.array, row: int) -> mx.array:
    """Remove one row of x [B, ...]; the last row takes its place. Returns [B - 1, ...]."""
    last = x.shape[0] - 1
    kept = x[:last]
    if row == last:
        return kept
    return mx.concatenate([kept[:row], x[last:], kept[row + 1 :]], axis=0)
