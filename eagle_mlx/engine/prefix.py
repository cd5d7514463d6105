"""What is kept of texts that were read, for prompts that begin as they did: a conversation's next turn above all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from eagle_mlx.cache import RaggedCache
from eagle_mlx.cache.pieces import KVPiece
from eagle_mlx.engine.prefix_tree import Keys, PrefixTree
from eagle_mlx.proposers.base import CanJoin, Proposer, ProposerState, Separable, StatePiece

LEAST = 16
"""Tokens below which a common beginning is not worth reading a prompt apart from others, or keeping a snapshot."""


@dataclass(frozen=True)
class Prefix:
    """The beginning of a prompt, for the row that is to take it over: nobody else uses these caches."""

    length: int
    cache: RaggedCache
    """Of one row, with so many positions."""
    state: ProposerState | None = None
    """The proposer's, where it reads the target's hidden states."""


@dataclass(frozen=True)
class Past:
    """The first positions of a row of a batch, of which copies may be kept."""

    length: int
    cache: RaggedCache
    row: int = 0
    state: Separable | None = None

    def piece(self, start: int, end: int) -> _Piece:
        state = self.state.piece(self.row, start, end) if self.state is not None else None
        return _Piece(self.cache.piece(self.row, start, end), state)


@dataclass(frozen=True)
class _Piece:
    """Of some positions, what target and proposer have."""

    target: KVPiece
    state: StatePiece | None

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.target.arrays, *(self.state.arrays if self.state is not None else ())]

    @cached_property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)

    def split(self, at: int) -> tuple[_Piece, _Piece]:
        first, second = self.target.split(at)
        if self.state is None:
            return _Piece(first, None), _Piece(second, None)
        states = self.state.split(at)
        return _Piece(first, states[0]), _Piece(second, states[1])


@dataclass(frozen=True)
class _Snapshot:
    outline: RaggedCache

    @cached_property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.outline.state)

    @cached_property
    def shortest(self) -> int:
        return self.outline.shortest(0)


class PrefixCache:
    """Keys and values of texts, each once, and the windows and states of some places in them.

    Keys and values can be cut anywhere. Windows and states cannot, so they are kept for the ends of texts and for the
    boundaries that requests name. The least recently used go first where all hold more than `capacity` bytes.

    The proposer's past is kept with the target's: a head that had not read the prompt would draft worse.
    """

    def __init__(self, capacity: int, proposer: Proposer | None = None):
        self.capacity, self.proposer = capacity, proposer
        self.spare: Callable[[], int] | None = None
        """Bytes that rows which decode leave to it, where somebody counts."""
        self._tree: PrefixTree[_Piece, _Snapshot] = PrefixTree()

    def __len__(self) -> int:
        """Places that a prompt can go on from: where all keys and values are kept, each text counts once."""
        return len(self._tree)

    @property
    def nbytes(self) -> int:
        return self._tree.nbytes

    def find(self, prompt: Sequence[int]) -> Prefix | None:
        """The longest beginning of a prompt that is kept; at least its last two tokens are left to be read.

        One is left because a row's newest token is never in its caches, the other because a head needs the target's
        hidden state at the position before it.
        """
        found = self._tree.find(_keys(prompt)[: max(0, len(prompt) - 2)], LEAST)
        if found is None:
            return None
        cache = found.snapshot.outline.joined([piece.target for piece in found.pieces], found.length)
        states = [piece.state for piece in found.pieces if piece.state is not None]
        if not states:
            return Prefix(found.length, cache)
        assert isinstance(self.proposer, CanJoin)
        return Prefix(found.length, cache, self.proposer.join(states, found.length))

    def keep(self, tokens: Sequence[int], past: Past) -> None:
        """Remember the past of a text, of which one token more is given; what is copied is computed where it fits."""
        if past.length < LEAST or past.length < past.cache.shortest(past.row):
            return
        snapshot, copies = _Snapshot(past.cache.outline(past.row, past.length)), list[_Piece]()

        def piece(start: int, end: int) -> _Piece:
            copies.append(past.piece(start, end))
            return copies[-1]

        try:
            if self._tree.insert(_keys(tokens[: past.length + 1]), snapshot, piece, self._limit):
                # While they wait to be computed they hold on to the batch's own buffers.
                mx.eval(snapshot.outline.state, [copy.arrays for copy in copies])
        except BaseException:
            self._tree = PrefixTree()  # it may be half changed
            raise

    def trim(self) -> None:
        """Let the least recently used go until all is within the limit."""
        self._tree.trim(self._limit)

    @property
    def _limit(self) -> int:
        return self.capacity if self.spare is None else min(self.capacity, self.spare())


def _keys(tokens: Sequence[int]) -> Keys:
    """[T - 1], for each position its token and the next one: a head's entry at a position is made with both."""
    text = np.asarray(tokens, np.int64)
    return (text[:-1] << 32) | text[1:]
