"""A radix tree of texts: what they have in common is kept once, and found without looking at each of them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.cache import RaggedCache
from eagle_mlx.cache.ragged import KVPiece
from eagle_mlx.proposers.base import Separable, StatePiece

Keys = NDArray[np.int64]
"""[N], one for each position of a text."""


@dataclass(frozen=True)
class PrefixPiece:
    """Of some positions, what target and proposer have."""

    target: KVPiece
    state: StatePiece | None

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.target.arrays, *(self.state.arrays if self.state is not None else ())]

    @cached_property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)

    def split(self, at: int) -> tuple[PrefixPiece, PrefixPiece]:
        """The first `at` positions and the others; this one is given away."""
        first, second = self.target.split(at)
        if self.state is None:
            return PrefixPiece(first, None), PrefixPiece(second, None)
        states = self.state.split(at)
        return PrefixPiece(first, states[0]), PrefixPiece(second, states[1])


@dataclass(frozen=True)
class Snapshot:
    """What is kept of one place in a text: windows and states, which cannot be put together from pieces."""

    outline: RaggedCache

    @cached_property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.outline.state)

    @cached_property
    def shortest(self) -> int:
        """From how many positions on it serves; its own place is the most."""
        return self.outline.shortest(0)


@dataclass(eq=False)
class _Node:
    """Positions `start` to `end` of all texts that pass here."""

    keys: Keys
    start: int
    piece: PrefixPiece | None
    """None at the root alone."""
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)
    """By the first of their keys."""
    snapshot: Snapshot | None = None
    """At `end`."""
    least: float = math.inf
    """The least `shortest` of all snapshots here and below."""
    namespace: str = ""
    """Of a root: whose texts are below."""

    @property
    def end(self) -> int:
        return self.start + len(self.keys)

    @property
    def path(self) -> list[_Node]:
        """From below the root to here."""
        nodes: list[_Node] = []
        node: _Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True)
class Found:
    """The beginning of a text."""

    length: int
    """Positions that can be taken over."""
    pieces: list[PrefixPiece]
    """They hold these positions, and maybe some behind them."""
    snapshot: Snapshot


class PrefixTree:
    """Pieces of texts, and snapshots at the ends of pieces. The least recently used snapshot goes first.

    A snapshot serves any text that begins as its own does, from `shortest` positions on. Pieces stay as long as a
    snapshot behind them does. Costs do not depend on how many texts there are.

    Texts of different namespaces have nothing in common. They share the limit of bytes.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._roots: dict[str, _Node] = {}
        """By namespace, those that have texts."""
        self._used: OrderedDict[_Node, None] = OrderedDict()
        """Those with a snapshot, the least recently used first."""

    def __len__(self) -> int:
        return len(self._used)

    @property
    def snapshots(self) -> list[Snapshot]:
        """All that are kept, the least recently used first."""
        return [node.snapshot for node in self._used if node.snapshot is not None]

    def find(self, keys: Keys, least: int = 1, namespace: str = "") -> Found | None:
        """The longest beginning that can be taken over; None where that is less than `least` positions."""
        node, matched = self._match(keys, namespace)
        while node.parent is not None:
            length = min(matched, node.end)
            if length < least:
                return None
            if node.least <= length:
                holder = self._holder(node, length)
                self._used.move_to_end(holder)
                assert holder.snapshot is not None
                return Found(length, [each.piece for each in node.path if each.piece is not None], holder.snapshot)
            node = node.parent
        return None

    def insert(
        self,
        keys: Keys,
        snapshot: Snapshot,
        piece: Callable[[int, int], PrefixPiece],
        limit: float = math.inf,
        namespace: str = "",
        check: Callable[[], None] | None = None,
    ) -> bool:
        """Keep a snapshot at the end of a text; whether it is kept, because nothing here serves as well.

        `piece`: gives what is to be kept of positions from one to another; it is asked for what is not here. Others go
        until all that is kept is within the limit. A text that has more bytes by itself is not kept.

        `check`: called before anything is changed, if the text is to be kept. Nothing is changed if it raises.
        """
        node, matched = self._match(keys, namespace)
        if matched == len(keys) and node.least <= snapshot.shortest:
            self._used.move_to_end(self._holder(node, snapshot.shortest))
            return False
        new = piece(matched, len(keys)) if matched < len(keys) else None
        if self._path_bytes(node, matched) + (new.nbytes if new else 0) + snapshot.nbytes > limit:
            return False
        if check is not None:
            check()
        if matched < node.end:
            node = self._split(node, matched)
        if new is not None:
            child = _Node(keys[matched:].copy(), matched, new, node)
            node.children[int(keys[matched])] = child
            if node.parent is None:
                self._roots[namespace] = node
            self.nbytes += new.nbytes
            node = child
        for each in node.path:  # whatever these serve for, the new one does
            if each.snapshot is not None and each.snapshot.shortest >= snapshot.shortest:
                self._forget(each)
        node.snapshot = snapshot
        self.nbytes += snapshot.nbytes
        self._used[node] = None
        _refresh(node)
        self.trim(limit)
        return node in self._used

    def trim(self, limit: float) -> None:
        """Let snapshots go, and the pieces that none needs, until all that is kept is within the limit."""
        while self._used and self.nbytes > limit:
            node = next(iter(self._used))
            self._forget(node)
            while node.parent is not None and node.snapshot is None and not node.children:
                assert node.piece is not None
                self.nbytes -= node.piece.nbytes
                del node.parent.children[int(node.keys[0])]
                node = node.parent
            if node.parent is None and not node.children:
                del self._roots[node.namespace]
            _refresh(node)

    def _forget(self, node: _Node) -> None:
        """Its snapshot alone."""
        assert node.snapshot is not None
        self.nbytes -= node.snapshot.nbytes
        node.snapshot = None
        del self._used[node]

    def _match(self, keys: Keys, namespace: str) -> tuple[_Node, int]:
        """The last node that a text passes, if only in part, and how many positions it has in common with that."""
        root: _Node = _Node(np.empty(0, np.int64), 0, None, None, namespace=namespace)
        node, at = self._roots.get(namespace, root), 0
        while at == node.end and at < len(keys) and (child := node.children.get(int(keys[at]))) is not None:
            node, at = child, at + common(child.keys, keys[at:])
        return node, at

    @staticmethod
    def _holder(node: _Node, length: int) -> _Node:
        """A node here or below whose snapshot serves for so many positions."""
        while node.snapshot is None or node.snapshot.shortest > length:
            node = next(child for child in node.children.values() if child.least <= length)
        return node

    @staticmethod
    def _path_bytes(node: _Node, matched: int) -> float:
        """Of the pieces of a text that is `matched` positions long, and ends in this node."""
        shares = [(min(matched, each.end) - each.start) / len(each.keys) for each in node.path]
        return sum(x * each.piece.nbytes for x, each in zip(shares, node.path, strict=True) if each.piece is not None)

    def _split(self, node: _Node, end: int) -> _Node:
        """Cut a node in two; the upper one, which ends there."""
        assert node.parent is not None
        assert node.piece is not None
        self.nbytes -= node.piece.nbytes
        first, second = node.piece.split(end - node.start)
        self.nbytes += first.nbytes + second.nbytes
        cut = end - node.start
        upper = _Node(node.keys[:cut].copy(), node.start, first, node.parent, least=node.least)
        node.parent.children[int(upper.keys[0])] = upper
        node.keys, node.start, node.piece, node.parent = node.keys[cut:].copy(), end, second, upper
        upper.children[int(node.keys[0])] = node
        return upper


def common(a: Keys, b: Keys) -> int:
    """Positions that two texts begin with in common."""
    both = min(len(a), len(b))
    same = a[:both] == b[:both]
    return both if same.all() else int(np.argmin(same))


def _refresh(node: _Node | None) -> None:
    """Find `least` anew, from here upwards."""
    while node is not None:
        own = math.inf if node.snapshot is None else node.snapshot.shortest
        node.least = min([own, *(child.least for child in node.children.values())])
        node = node.parent


@dataclass(frozen=True)
class Past:
    """The first positions of a row of a batch, of which copies may be kept."""

    length: int
    cache: RaggedCache
    row: int = 0
    state: Separable | None = None
    namespace: str = ""
    """The request's; only prompts of the same one may begin with it."""

    def piece(self, start: int, end: int) -> PrefixPiece:
        state = self.state.piece(self.row, start, end) if self.state is not None else None
        return PrefixPiece(self.cache.piece(self.row, start, end), state)


def keys_of(tokens: Sequence[int]) -> Keys:
    """[T - 1], for each position its token and the next one: a head's entry at a position is made with both."""
    text = np.asarray(tokens, np.int64)
    return (text[:-1] << 32) | text[1:]
