"""A radix tree of texts, which stores shared prefixes once."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import shake_256

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.cache.ragged import KVPiece, RaggedCache
from eagle_mlx.proposers.base import HeadPiece, ProposerState
from eagle_mlx.vision.spans import ImageSpan

Keys = NDArray[np.int64]  # [N]: one key per position of a text

MOST_ARRAYS = 200_000
"""Arrays in a tree. Metal lets a process have 499,000 buffers (mlx#1718), one for each array; in a 4-bit cache, a text
of 36 layers has 216. Two models may share a server."""
Space = tuple[str, bool]
"""A namespace, and whether its states are a draft model's. Spaces share only the limit of bytes."""


@dataclass(frozen=True)
class PrefixPiece:
    """The target's and the proposer's state for a range of positions."""

    target: KVPiece
    state: HeadPiece | None

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.target.arrays, *(self.state.arrays if self.state is not None else ())]

    @cached_property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)

    def split(self, at: int) -> tuple[PrefixPiece, PrefixPiece]:
        """Return the first `at` positions and the rest. This piece must not be used afterwards."""
        first, second = self.target.split(at)
        states = self.state.split(at) if self.state is not None else (None, None)
        return PrefixPiece(first, states[0]), PrefixPiece(second, states[1])


@dataclass(eq=False)
class _Node:
    """Positions `start` to `end`, shared by all texts below."""

    keys: Keys
    start: int
    piece: PrefixPiece | None  # None only at the root
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)  # by first key
    snapshot: RaggedCache | None = None
    """Windows and states at position `end`, which cannot be assembled from pieces (`RaggedCache.outline`)."""
    shortest: int = 0  # the minimum prefix length that the snapshot serves; the maximum is `end`
    space: Space = ("", False)  # the space of the texts below; only at a root

    @property
    def end(self) -> int:
        return self.start + len(self.keys)

    @property
    def path(self) -> list[_Node]:
        """The nodes from below the root to this one."""
        nodes, node = list[_Node](), self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True)
class Found:
    """A cached prefix of a text."""

    length: int
    pieces: list[PrefixPiece]  # pieces with these positions, and possibly later ones
    snapshot: RaggedCache

    @property
    def cache(self) -> RaggedCache:
        return self.snapshot.joined([piece.target for piece in self.pieces], self.length)


class PrefixTree:
    """Pieces of texts, and snapshots at the ends of pieces. The least recently used snapshot is evicted first.

    A snapshot serves any text that shares at least its first `shortest` positions. A piece stays while a snapshot at
    its end or below it does.
    """

    def __init__(self) -> None:
        self.nbytes = self._arrays = 0
        self._roots: dict[Space, _Node] = {}
        self.used: OrderedDict[_Node, None] = OrderedDict()  # the nodes with a snapshot, least recently used first

    def find(self, keys: Keys, least: int = 1, space: Space = ("", False)) -> Found | None:
        """Return the longest prefix that can be reused, or None if it has fewer than `least` positions."""
        node, matched = self._match(keys, space)
        while node.parent is not None and (length := min(matched, node.end)) >= least:
            if (holder := _holder(node, length)) is not None:
                self.used.move_to_end(holder)
                assert holder.snapshot is not None
                return Found(length, [part.piece for part in node.path if part.piece is not None], holder.snapshot)
            node = node.parent
        return None

    def matched(self, keys: Keys, space: Space = ("", False)) -> int:
        """Return how many first positions of a text are here, even if no snapshot serves them."""
        return self._match(keys, space)[1]

    def insert(
        self,
        keys: Keys,
        snapshot: RaggedCache,
        piece: Callable[[int, int], PrefixPiece],
        limit: float = math.inf,
        space: Space = ("", False),
    ) -> bool:
        """Insert a snapshot at the end of a text, unless another serves as well. Return whether the tree has the text.

        `piece`: returns the state for a range of positions; called for the missing ones. Other entries are evicted
        until `limit` bytes hold. A text that exceeds the limit alone is not inserted, nor one whose state has NaN.
        """
        shortest, states = snapshot.shortest(0), snapshot.state
        node, matched = self._match(keys, space)
        if matched == len(keys) and (holder := _holder(node, shortest)) is not None:
            self.used.move_to_end(holder)
            return True
        new = piece(matched, len(keys)) if matched < len(keys) else None
        size = sum(x.nbytes for x in states) + (new.nbytes if new else 0.0)
        for part in node.path:
            if part.piece is not None:
                size += part.piece.nbytes * (min(matched, part.end) - part.start) / len(part.keys)
        if size > limit or not _are_numbers([*states, *(new.arrays if new else [])]):
            return False
        if matched < node.end:
            node = self._split(node, matched)
        if new is not None:
            if node.parent is None:
                self._roots[space] = node
            parent, node = node, _Node(keys[matched:].copy(), matched, new, node)
            parent.children[int(keys[matched])] = node
            self._count(new.arrays)
        for part in node.path:  # the new one serves everything that these do
            if part.snapshot is not None and part.shortest >= shortest:
                self._forget(part)
        node.snapshot, node.shortest = snapshot, shortest
        self._count(states)
        self.used[node] = None
        self.trim(limit)
        return node in self.used

    def trim(self, limit: float) -> None:
        """Evict snapshots, and pieces that no other snapshot needs, until the limit and `MOST_ARRAYS` hold."""
        while self.used and (self.nbytes > limit or self._arrays > MOST_ARRAYS):
            node = next(iter(self.used))
            self._forget(node)
            while node.parent is not None and node.snapshot is None and not node.children:
                assert node.piece is not None
                self._count(node.piece.arrays, -1)
                del node.parent.children[int(node.keys[0])]
                node = node.parent
            if node.parent is None and not node.children:
                del self._roots[node.space]

    def _forget(self, node: _Node) -> None:
        assert node.snapshot is not None
        self._count(node.snapshot.state, -1)
        node.snapshot = None
        del self.used[node]

    def _count(self, arrays: Sequence[mx.array], sign: int = 1) -> None:
        self.nbytes += sign * sum(x.nbytes for x in arrays)
        self._arrays += sign * len(arrays)

    def _match(self, keys: Keys, space: Space) -> tuple[_Node, int]:
        """Return the last node that matches a text, at least in part, and the number of matched positions."""
        root: _Node = _Node(np.empty(0, np.int64), 0, None, None, space=space)
        node, at = self._roots.get(space, root), 0
        while at == node.end and at < len(keys) and (child := node.children.get(int(keys[at]))) is not None:
            node, at = child, at + common(child.keys, keys[at:])
        return node, at

    def _split(self, node: _Node, end: int) -> _Node:
        assert node.parent is not None
        assert node.piece is not None
        cut = end - node.start
        self._count(node.piece.arrays, -1)
        first, second = node.piece.split(cut)
        self._count([*first.arrays, *second.arrays])
        upper = _Node(node.keys[:cut].copy(), node.start, first, node.parent)
        node.parent.children[int(upper.keys[0])] = upper
        node.keys, node.start = node.keys[cut:].copy(), end
        node.piece, node.parent = second, upper
        upper.children[int(node.keys[0])] = node
        return upper


def common(a: Keys, b: Keys) -> int:
    """Return the length of the common prefix of two texts."""
    both = min(len(a), len(b))
    same = a[:both] == b[:both]
    return both if same.all() else int(np.argmin(same))


def _are_numbers(arrays: list[mx.array]) -> bool:
    """Return whether no array has NaN. All are evaluated: lazy copies would keep the batch's buffers alive."""
    nan = [mx.any(mx.isnan(x)) for x in arrays if mx.issubdtype(x.dtype, mx.floating)]
    mx.eval(arrays, nan)
    return not any(x.item() for x in nan)


def _holder(node: _Node, length: int) -> _Node | None:
    """Return a node, here or below, with a snapshot that serves `length` positions."""
    nodes = [node]
    while nodes:
        node = nodes.pop()
        if node.snapshot is not None and node.shortest <= length:
            return node
        nodes += node.children.values()
    return None


@dataclass(frozen=True)
class Past:
    """The first positions of a batch's row, for copies into the prefix cache."""

    length: int
    cache: RaggedCache
    row: int = 0
    state: ProposerState | None = None
    namespace: str = ""  # of the request; only its prompts may reuse this
    of_draft_model: bool = False  # instead of the target's
    images: Sequence[ImageSpan] = ()

    def piece(self, start: int, end: int) -> PrefixPiece:
        state = self.state.piece(self.row, start, end) if self.state is not None else None
        return PrefixPiece(self.cache.piece(self.row, start, end), state)


def _numbers(digest: bytes, count: int) -> Keys:
    """Return numbers [count] that differ for every other image. They are above all token ids, and small enough for half
    a key."""
    stream = np.frombuffer(shake_256(digest).digest(4 * count), np.uint32)
    return stream.astype(np.int64) % (1 << 30) + (1 << 30)


def keys_of(tokens: Sequence[int], images: Sequence[ImageSpan] = ()) -> Keys:
    """Return [T - 1] keys. Each combines a token and the next, because a head's entry depends on both. An image's
    tokens count as numbers that depend on the image."""
    text = np.array(tokens, np.int64)
    for span in images:
        end = max(span.start, min(span.end, len(text)))
        text[span.start : end] = _numbers(span.image.digest, end - span.start)
    return (text[:-1] << 32) | text[1:]
