"""The pasts of ended requests, for prompts that begin as they did: a conversation's next turn above all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import mlx.core as mx
import numpy as np

from eagle_mlx.cache import RaggedCache
from eagle_mlx.proposers.base import ForkableState

LEAST = 16
"""Tokens below which a common beginning is not worth reading a prompt apart from others."""


@dataclass(frozen=True)
class Prefix:
    """A past of one row, of which a new row may take from `shortest` up to `length` positions over."""

    length: int
    cache: RaggedCache
    state: ForkableState | None
    """The proposer's, where it reads the target's hidden states."""

    @property
    def shortest(self) -> int:
        return self.cache.shortest(0)


@dataclass(frozen=True)
class _Entry:
    tokens: np.ndarray
    """[N] int64, a row's prompt and text: N - 1 positions are in its caches."""
    past: Prefix
    nbytes: int

    def covers(self, other: _Entry) -> bool:
        """Whether whatever could be taken over of the other could be taken over of this one."""
        return self.past.shortest <= other.past.shortest and _begins(self.tokens, other.tokens)


class PrefixCache:
    """The least recently used past goes first where they hold more than `capacity` bytes together.

    The proposer's past is kept with the target's: a head that had not read the prompt would draft worse.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.spare: Callable[[], int] | None = None
        """Bytes that rows which decode leave to it, where somebody counts."""
        self.nbytes = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._names = count()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, prompt: Sequence[int]) -> Prefix | None:
        """The longest past that the prompt begins with; at least its last two tokens are left to be read.

        One is left because a row's newest token is never in its caches, the other because a head needs the target's
        hidden state at the position before it.
        """
        wanted = np.asarray(prompt, np.int64)
        best, name = LEAST - 1, None
        for key, entry in self._entries.items():
            usable = self._usable(entry, wanted)
            if usable > best:
                best, name = usable, key
        if name is None:
            return None
        self._entries.move_to_end(name)
        past = self._entries[name].past
        return Prefix(best, past.cache, past.state)

    @staticmethod
    def _usable(entry: _Entry, wanted: np.ndarray) -> int:
        """Positions of the entry that a prompt can take over."""
        both = min(len(entry.tokens), len(wanted))
        same = (
            both
            if np.array_equal(entry.tokens[:both], wanted[:both])
            else int(np.argmin(entry.tokens[:both] == wanted[:both]))
        )
        # A head's entry at a position is made with the token after it, which must be the same one too.
        length = min(same - 1, entry.past.length, len(wanted) - 2)
        return length if length >= entry.past.shortest else 0

    def keep(self, tokens: Sequence[int], past: Prefix) -> None:
        """Remember a past; the arrays are its own, and are computed only where they fit."""
        arrays = [*past.cache.state, *(past.state.arrays if past.state is not None else ())]
        entry = _Entry(np.asarray(tokens, np.int64), past, sum(x.nbytes for x in arrays))
        if past.length < LEAST or entry.nbytes > self._limit:
            return
        for name in [name for name, other in self._entries.items() if entry.covers(other)]:
            self._drop(name)
        self.trim(entry.nbytes)
        mx.eval(arrays)  # while they wait to be computed they hold on to the batch's own buffers
        self._entries[next(self._names)] = entry
        self.nbytes += entry.nbytes

    def trim(self, more: int = 0) -> None:
        """Let pasts go until they and so many bytes more are within the limit."""
        limit = self._limit - more
        while self._entries and self.nbytes > limit:
            self._drop(next(iter(self._entries)))

    @property
    def _limit(self) -> int:
        return self.capacity if self.spare is None else min(self.capacity, self.spare())

    def _drop(self, name: int) -> None:
        self.nbytes -= self._entries.pop(name).nbytes


def _begins(text: np.ndarray, start: np.ndarray) -> bool:
    return len(start) <= len(text) and np.array_equal(text[: len(start)], start)
