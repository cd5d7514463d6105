"""What the prefix cache keeps of some positions of a text: the target's keys and values, and the proposer's part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from eagle_mlx.cache import RaggedCache
from eagle_mlx.cache.ragged import KVPiece
from eagle_mlx.engine.prefix_tree import Keys
from eagle_mlx.proposers.base import Separable, StatePiece


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
        first, second = self.target.split(at)
        if self.state is None:
            return PrefixPiece(first, None), PrefixPiece(second, None)
        states = self.state.split(at)
        return PrefixPiece(first, states[0]), PrefixPiece(second, states[1])


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
