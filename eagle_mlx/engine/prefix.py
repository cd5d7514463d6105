"""What is kept of texts that were read, for prompts that begin as they did: a conversation's next turn above all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from eagle_mlx.cache import RaggedCache
from eagle_mlx.engine.disk import DiskTier, PassedOverError
from eagle_mlx.engine.prefix_tree import Keys, Past, PrefixPiece, PrefixTree, Snapshot, keys_of
from eagle_mlx.proposers.base import CanJoin, Proposer, ProposerState

log = logging.getLogger("eagle_mlx.prefixes")
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


class _NotNumbersError(Exception):
    """Raised for a past that holds NaN."""


class PrefixCache:
    """Keys and values of texts, each once, and the windows and states of some places in them.

    Keys and values can be cut anywhere. Windows and states cannot, so they are kept for the ends of texts and for the
    boundaries that requests name. The least recently used go first where all hold more than `capacity` bytes.

    A prompt goes on only from texts of its own namespace (`Request.namespace`).

    The proposer's past is kept with the target's: a head that had not read the prompt would draft worse.
    """

    def __init__(self, capacity: int, proposer: Proposer | None = None):
        self.capacity, self.proposer = capacity, proposer
        self.spare: Callable[[], int] | None = None
        """Bytes that rows which decode leave to it, where somebody counts."""
        self.disk: DiskTier | None = None
        """Where it is kept beyond the process, and looked for what is not in memory."""
        self._tree = PrefixTree()

    def __len__(self) -> int:
        """Places that a prompt can go on from: where all keys and values are kept, each text counts once."""
        return len(self._tree)

    @property
    def nbytes(self) -> int:
        return self._tree.nbytes

    def find(self, prompt: Sequence[int], namespace: str = "") -> Prefix | None:
        """The longest beginning of a prompt that is kept; at least its last two tokens are left to be read.

        One is left because a row's newest token is never in its caches, the other because a head needs the target's
        hidden state at the position before it.
        """
        found = self._tree.find(_findable(prompt), LEAST, namespace)
        if found is None:
            return None
        cache = found.snapshot.outline.joined([piece.target for piece in found.pieces], found.length)
        states = [piece.state for piece in found.pieces if piece.state is not None]
        if not states:
            return Prefix(found.length, cache)
        assert isinstance(self.proposer, CanJoin)
        return Prefix(found.length, cache, self.proposer.join(states, found.length, prompt))

    def fetch(self, prompt: Sequence[int], namespace: str = "") -> bool:
        """Have in memory what the disk has of a prompt, where that is more than what is here, and fits.

        It reads a bounded amount, for others decode meanwhile; whether there is no more to come.
        """
        if self.disk is None:
            return True
        keys = _findable(prompt)
        known = self._tree.find(keys, 1, namespace)
        length = known.length if known is not None else 0
        while (match := self.disk.find(keys, namespace)) is not None and match.length >= length + LEAST:
            if match.nbytes > self._limit:
                return True
            try:
                now = self.disk.advance(match, length)
                if now is None:
                    return False
                snapshot = Snapshot(self.disk.outline(now))
                piece = partial(self.disk.piece, now)
                kept = self._tree.insert(keys[: now.length], snapshot, piece, self._limit, namespace)
            except PassedOverError:
                self.disk.stop()
                continue  # with what other files have
            except BaseException as e:
                self._tree = PrefixTree()  # it may be half changed
                if not isinstance(e, Exception):
                    raise
                log.exception("what files hold of a prompt could not be taken over; it is read anew")
                return True
            complete = now.length == match.length
            if kept:
                self.disk.took(now, now.length - length, complete)
            return complete or not kept
        return True

    def stop_fetching(self) -> None:
        """Forget what has been read of prompts that nobody may wait for any longer, and is not here yet."""
        if self.disk is not None:
            self.disk.stop()

    def keep(self, tokens: Sequence[int], past: Past) -> None:
        """Remember the past of a text, of which one token more is given; what is copied is computed where it fits.

        A past that holds NaN is not kept: every prompt that goes on from it would fail.
        """
        if past.length < LEAST or past.length < past.cache.shortest(past.row):
            return
        snapshot, copies = Snapshot(past.cache.outline(past.row, past.length)), list[PrefixPiece]()
        keys = keys_of(tokens[: past.length + 1])

        def piece(start: int, end: int) -> PrefixPiece:
            copies.append(past.piece(start, end))
            return copies[-1]

        def check() -> None:
            # While they wait to be computed they hold on to the batch's own buffers.
            _check_numbers([*snapshot.outline.state, *(x for copy in copies for x in copy.arrays)])

        try:
            kept = self._tree.insert(keys, snapshot, piece, self._limit, past.namespace, check)
        except _NotNumbersError:  # raised before the tree is changed
            log.warning("a text is not kept for later prompts: its keys and values are not numbers (NaN)")
            return
        except BaseException:
            self._tree = PrefixTree()  # it may be half changed
            raise
        if self.disk is not None and (kept or self._holds(keys, past.namespace)):
            self.disk.offer(keys, past, snapshot.outline)

    def _holds(self, keys: Keys, namespace: str) -> bool:
        """Whether all of a text is here."""
        found = self._tree.find(keys, 1, namespace)
        return found is not None and found.length == len(keys)

    def trim(self) -> None:
        """Let the least recently used go until all is within the limit."""
        self._tree.trim(self._limit)

    @property
    def _limit(self) -> int:
        return self.capacity if self.spare is None else min(self.capacity, self.spare())


def _check_numbers(arrays: Sequence[mx.array]) -> None:
    """Compute some arrays. Raise _NotNumbersError if one holds NaN; a round may not have checked them yet."""
    found = [mx.any(mx.isnan(x)) for x in arrays if mx.issubdtype(x.dtype, mx.floating)]
    mx.eval(*arrays, *found)
    if any(each.item() for each in found):
        raise _NotNumbersError


def _findable(prompt: Sequence[int]) -> Keys:
    """The keys of a prompt but for what must be read in any case."""
    return keys_of(prompt)[: max(0, len(prompt) - 2)]
