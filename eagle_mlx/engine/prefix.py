"""The prefix cache, which lets prompts reuse the KV state of earlier texts, such as previous turns."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from eagle_mlx.cache import RaggedCache
from eagle_mlx.engine.disk import DiskTier, PassedOverError
from eagle_mlx.engine.prefix_tree import Keys, Past, PrefixTree, keys_of
from eagle_mlx.proposers.base import Proposer, ProposerState
from eagle_mlx.vision.spans import ImageSpan

log = logging.getLogger("eagle_mlx.prefixes")
LEAST = 16
"""Minimum length of a useful prefix. Shorter ones do not justify a separate prefill or a snapshot."""


@dataclass(frozen=True)
class Prefix:
    """A cached prefix of a prompt. The row that gets it owns these caches."""

    length: int
    cache: RaggedCache  # one row with `length` positions
    state: ProposerState | None = None  # the proposer's state, if it reads the target's hidden states
    draft: RaggedCache | None = None  # a draft model's cache of one row, which may be shorter or longer


class PrefixCache:
    """Caches keys and values of texts without duplicates, with snapshots of windows and states at some positions.

    Keys and values can be cut anywhere. Sliding windows and recurrent states cannot, so they are kept for the ends of
    texts and for requests' boundaries. A prompt only reuses texts of its own namespace. The proposer's state is cached
    too. A draft model's cache is stored like a target's, because it depends on the text alone.
    """

    def __init__(
        self,
        capacity: int,
        proposer: Proposer | None = None,
        spare: Callable[[], float] = lambda: math.inf,
        disk: DiskTier | None = None,
    ):
        """`capacity`: bytes. `spare`: returns the bytes that rows leave to the cache. `disk`: saves texts across
        restarts, and is searched for those not in memory."""
        self.capacity, self._spare = capacity, spare
        self.proposer, self.disk = proposer, disk
        self.tree = PrefixTree()

    @property
    def nbytes(self) -> int:
        return self.tree.nbytes

    def find(self, prompt: Sequence[int], namespace: str = "", images: Sequence[ImageSpan] = ()) -> Prefix | None:
        """Return the longest cached prefix of a prompt, without the prompt's last two tokens, or None."""
        with self._emptied_if_it_fails():
            keys = _findable(prompt, images)
            draft = self.tree.find(keys, LEAST, (namespace, True))
            match = self.tree.find(keys, LEAST, (namespace, False))
            if match is None:
                return None
            states = [piece.state for piece in match.pieces if piece.state is not None]
            if self.proposer is None or not states:
                return Prefix(match.length, match.cache, draft=draft.cache if draft is not None else None)
            return Prefix(match.length, match.cache, self.proposer.join(states, match.length, prompt))
        return None

    def fetch(self, prompt: Sequence[int], namespace: str = "", images: Sequence[ImageSpan] = ()) -> bool:
        """Load some of a prompt's prefix from disk, if it fits and is longer than the one in memory. Return whether it
        is done: a call reads a bounded amount, because other requests decode meanwhile."""
        with self._emptied_if_it_fails():
            return self.disk is None or self._fetch(self.disk, _findable(prompt, images), namespace)
        return True

    def _fetch(self, disk: DiskTier, keys: Keys, namespace: str) -> bool:
        cached = self.tree.find(keys, 1, (namespace, False))
        length = cached.length if cached is not None else 0
        while (match := disk.find(keys, namespace)) is not None and match.length >= length + LEAST:
            if match.nbytes > self._limit:
                return True
            try:
                now = disk.advance(match, self.tree.matched(keys, (namespace, False)))
                if now is None:
                    return False
                outline, piece = disk.outline(now), partial(disk.piece, now)
                kept = self.tree.insert(keys[: now.length], outline, piece, self._limit, (namespace, False))
            except PassedOverError:
                disk.ahead.clear()
                continue  # try other files
            complete = now.length == match.length
            disk.took(now, now.length - length if kept else 0, complete)
            return complete or not kept
        return True

    def stop_fetching(self) -> None:
        if self.disk is not None:
            self.disk.ahead.clear()

    def keep(self, tokens: Sequence[int], past: Past) -> None:
        """Cache the state of a text, of which `tokens` has at least one more."""
        if past.length < LEAST or past.length < past.cache.shortest(past.row):
            return
        with self._emptied_if_it_fails():
            keys = keys_of(tokens[: past.length + 1], past.images)
            outline = past.cache.outline(past.row, past.length)
            kept = self.tree.insert(keys, outline, past.piece, self._limit, (past.namespace, past.of_draft_model))
            if self.disk is not None and kept and not past.of_draft_model:
                self.disk.offer(keys, past, outline)

    def trim(self) -> None:
        with self._emptied_if_it_fails():
            self.tree.trim(self._limit)

    @contextmanager
    def _emptied_if_it_fails(self) -> Iterator[None]:
        """Use the tree and the files. If that raises, forget all of the tree, which may be inconsistent. No request
        needs the cache, so only interrupts are passed on."""
        try:
            yield
        except BaseException as e:
            self.tree = PrefixTree()
            if not isinstance(e, Exception):
                raise
            log.exception("the prefix cache failed and is empty now; prompts are computed again")

    @property
    def _limit(self) -> float:
        return min(self.capacity, self._spare())


def _findable(prompt: Sequence[int], images: Sequence[ImageSpan]) -> Keys:
    """Return a prompt's keys without the positions that must be read: a row's newest token is never in its caches, and
    a head needs the target's hidden state before it."""
    return keys_of(prompt, images)[: max(0, len(prompt) - 2)]
