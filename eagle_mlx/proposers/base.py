"""The base classes of proposers and their states, and the validation of drafts.

All batches share one proposer; it opens a state for each batch's rows. In each round, the engine calls `draft`,
verifies, and calls `observe`. The engine knows nothing else of drafting. For a short example, see `ngram.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self

import mlx.core as mx

from eagle_mlx.cache.ragged import CacheSize, KVPiece, RaggedCache
from eagle_mlx.decoding.draft import Draft, Tree
from eagle_mlx.decoding.processors import said
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.errors import ProposerError
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.plan import Abilities, Plan, Trial
from eagle_mlx.proposers.memory import Memory
from eagle_mlx.sampling_params import Drafter
from eagle_mlx.target import Target


@dataclass(frozen=True)
class Observation:
    """Positions that the target has read since the last observation."""

    tokens: Sequence[Sequence[int]]
    """For each row, the token after each position; empty in a prefill if the row's prompt has been read."""
    aux: tuple[mx.array, ...]
    """The outputs of the proposer's aux layers at these positions, each [B, L, H], right-padded."""
    embeddings: mx.array | None = None
    """[B, L, H], the target's embeddings of `tokens`, if some are images and the proposer's head reads these."""


DROPPED = 2  # the mark of a position whose entry a draft window has left behind


@dataclass(frozen=True)
class HeadPiece:
    """A proposer's cache entries for consecutive positions of a row, for the prefix cache."""

    entries: KVPiece
    marks: bytes  # for each position: 1 if it has an entry, 0 if the head has not read it, or DROPPED

    @property
    def arrays(self) -> list[mx.array]:
        return self.entries.arrays

    def split(self, at: int) -> tuple[HeadPiece, HeadPiece]:
        """Split into the first `at` positions and the rest. Do not use this piece afterward."""
        first, second = self.entries.split(self.marks.count(1, 0, at))
        return HeadPiece(first, self.marks[:at]), HeadPiece(second, self.marks[at:])


class ProposerState(ABC):
    """A proposer's state for a batch's rows. Methods that are not abstract have defaults that do nothing."""

    def enter(self, namespaces: Sequence[str | None]) -> None:
        """Say of which namespaces earlier texts may draft for the rows, which have just been opened; None: of none."""

    def prefill(self, seen: Observation) -> None:
        """Observe a chunk of the prompts. Without aux layers, `seen.aux` is empty."""

    @abstractmethod
    def draft(self, plan: Plan, sampling: SamplingBatch, positions: mx.array) -> Draft:
        """Draft what the plan asks for after each row, or the closest that this proposer can, with depth >= 1.

        With `plan.stop_below`, a chain ends when the rows' mean confidence in the token `CONFIDENCE_LAG` before the
        newest falls below it. All tokens drafted by then are kept: if a token's value decided whether it is kept,
        sampled text would change. `positions` [B] int32, of each row's first draft token, keys the noise. Rows with
        `plan.lookups` are drafted by others: their tokens here are not verified.
        """

    @abstractmethod
    def observe(self, seen: Observation) -> None:
        """Observe what the target has read, and the tokens that follow."""

    @abstractmethod
    def append(self, other: Self) -> None:
        """Append the other state's rows."""

    @abstractmethod
    def remove(self, row: int) -> None:
        """Remove a row. The last row takes its place."""

    def take(self, row: int) -> Self:
        """Remove a row and return its state, if the proposer is `movable`. At least one other row remains."""
        raise ProposerError(f"the proposer is movable, so {type(self).__name__} needs the method take")

    def length(self, row: int) -> int:
        """Return the number of positions that the row has read; 0 if the prefix cache cannot store them."""
        return 0

    def piece(self, row: int, start: int, end: int) -> HeadPiece:
        """Return a copy of the state for positions `start` to `end` of a row, for the prefix cache."""
        raise ProposerError(f"{type(self).__name__} has a length, so it needs the method piece")

    @property
    def draft_cache(self) -> RaggedCache | None:
        """The cache of a draft model, which depends on the texts alone. The prefix cache stores `length` positions."""
        return None

    def resume(self, cache: RaggedCache) -> None:
        """Continue from a `draft_cache` of the beginning of a single row that has read nothing."""

    def matches(self, drafters: Sequence[Drafter | None]) -> tuple[int, ...]:
        """Return the tokens of the n-gram that matches in each row, 0 for rows without one or that may not draft from
        it; empty if there is none. `drafters`: as in `may_draft`."""
        return ()

    def trials(self, drafters: Sequence[Drafter | None]) -> list[Trial]:
        """Return the trials that ended since the last call, of rows for which n-grams may draft."""
        return []

    def may_draft(self, drafter: Drafter | None, lookup: bool) -> bool:
        """Return whether a row with this setting drafts, from its match (`lookup`) or by the model. None allows any."""
        return drafter != "none"


class Proposer(ABC):
    """Drafts for all batches. Methods that are not abstract have defaults that do nothing."""

    name: str = "proposer"
    aux_layers: tuple[int, ...] = ()
    """Target layers, counted from 0, whose outputs `observe` needs."""
    abilities = Abilities()
    """The drafts that this proposer can make besides chains of fixed depth."""
    movable = False
    """Whether its states have `take`, so that rows can move between two batches. Otherwise all stay in one."""
    is_positional = True
    """Whether the cache of its own model, if any, can be cut at every position."""
    memory: Memory | None = None
    """Texts to draft with. The engine adds those of requests that ended."""
    head: DraftHead | None = None
    """The head that the states depend on. Without one, they cannot be saved to disk."""

    def bind(self, target: Target) -> None:
        """Bind the proposer to a target when the engine is built. Raises an EagleError if the target does not fit."""

    @abstractmethod
    def open(self, prompts: Sequence[Sequence[int]]) -> ProposerState:
        """Return a state for new rows, before the target has read them."""

    def join(self, pieces: Sequence[HeadPiece], length: int, prompt: Sequence[int] = ()) -> ProposerState:
        """Return a state of one row that has read the first `length` positions of `prompt`.

        The pieces start at position 0 and cover at least `length` positions. At least one more position is read before
        the next draft.
        """
        raise ProposerError(f"the states of {type(self).__name__} have pieces, so it needs the method join")

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights read in a round, without the target's. The proposer is bound first."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of all its weights."""
        return self.weight_bytes

    def cache_size(self) -> CacheSize:
        """Return the size of its caches. The proposer is bound first."""
        return CacheSize()


_SUM_TOLERANCE = 1e-3
"""Maximum error of the sum of a distribution; float32 over a large vocabulary is much more accurate."""


def check_draft(
    draft: Draft, by: str, plan: Plan, rooms: Sequence[int], vocab: int, last: mx.array, rejects: mx.array | None
) -> Draft:
    """Return the draft without unusable parts, so that the text is the target's own whatever was drafted.

    A row's draft ends before the first id outside the vocabulary and before the first position with invalid
    probabilities. Lengths are clipped, and surplus tokens are cut. Values are checked on the device without a sync.

    by: the proposer's name, for errors; rooms: the maximum chain length of each row; last: [B, 1] int32, each row's
    newest token, used as padding; rejects: [B] bool, the rows verified by rejection sampling, or None. Raises
    ProposerError if shapes or dtypes are unusable.
    """
    _check_arrays(draft, by, plan, len(rooms), vocab)
    width = min(draft.tokens.shape[1], plan.size)
    if not width:
        none = mx.zeros((len(rooms),), mx.int32)
        return Draft(mx.zeros((none.size, 0), mx.int32), none, confidences=draft.confidences)
    tokens = draft.tokens[:, :width].astype(mx.int32)
    legal = tokens.astype(mx.uint32) < vocab  # negative ids become large
    probs = None
    if draft.probs is not None and rejects is not None:
        probs = draft.probs[:, :width].astype(mx.float32)
        legal = legal & (_are_probabilities(probs, tokens) | ~rejects[:, None])
    places = mx.arange(width, dtype=mx.int32)
    # In a tree, the verify checks each node's depth against the room.
    most = [min(room, width) if draft.tree is None or room <= 0 else width for room in rooms]
    lengths = mx.clip(draft.lengths.astype(mx.int32), 0, width if min(most) == width else mx.array(most, mx.int32))
    lengths = mx.min(mx.where(legal, lengths[:, None], places), axis=1)
    tokens = mx.where(places < lengths[:, None], tokens, last)
    tree = None
    if draft.tree is not None:  # invalid parents are replaced; any tree gives a correct result
        parents = mx.clip(draft.tree.parents[:, :width].astype(mx.int32), 0, mx.arange(width, dtype=mx.int32))
        tree = Tree(parents, min(draft.tree.levels, plan.depth, width))
    return replace(draft, tokens=tokens, lengths=lengths, probs=probs, tree=tree)


def _are_probabilities(probs: mx.array, tokens: mx.array) -> mx.array:
    """Return whether each position has a valid distribution that gives its token a chance, [B, k] bool."""
    in_range = mx.clip(tokens, 0, probs.shape[-1] - 1)
    drawn = mx.take_along_axis(probs, in_range[..., None], axis=-1)[..., 0]
    whole = mx.abs(probs.sum(axis=-1) - 1) < _SUM_TOLERANCE  # false for NaN
    return whole & (probs.min(axis=-1) >= 0) & (drawn > 0)


def _check_arrays(draft: Any, by: str, plan: Plan, rows: int, vocab: int) -> None:
    """Raise ProposerError if shapes or dtypes are wrong. Reads nothing from the device."""

    def refuse(what: str, wanted: str) -> NoReturn:
        raise ProposerError(f"the proposer {by!r} returned {what}; {wanted}")

    if not isinstance(draft, Draft):
        refuse(f"{said(draft)} as a draft", "return an eagle_mlx.decoding.draft.Draft, without tokens if it has none")
    tokens, lengths, probs, tree = draft.tokens, draft.lengths, draft.probs, draft.tree
    if not _holds(tokens, mx.integer) or tokens.ndim != 2 or tokens.shape[0] != rows:
        refuse(f"{said(tokens)} as tokens", f"return [{rows}, k] int32, one line per row")
    if not _holds(lengths, mx.integer) or lengths.shape != (rows,):
        refuse(f"{said(lengths)} as lengths", f"return [{rows}] int32, the number of real tokens in each row")
    wanted = (*tokens.shape, vocab)
    if probs is not None and (not _holds(probs, mx.floating) or probs.shape != wanted):
        refuse(f"{said(probs)} as probs", f"return {list(wanted)} float32, or None if nothing was sampled")
    if tree is not None:
        if not isinstance(tree, Tree):
            refuse(f"{said(tree)} as a tree", "return an eagle_mlx.decoding.draft.Tree, or None for chains")
        if not plan.is_tree:
            refuse("a tree instead of a chain", "return one only if plan.is_tree")
        if not _holds(tree.parents, mx.integer) or tree.parents.shape != tokens.shape:
            refuse(f"{said(tree.parents)} as a tree's parents", f"return {list(tokens.shape)} int32, one per token")
        if not isinstance(tree.levels, int) or tree.levels < 1:
            refuse(f"{tree.levels!r} as a tree's levels", "return a bound on its depth, at least 1")
    for looked in draft.confidences if isinstance(draft.confidences, Sequence) else [draft.confidences]:
        shares = isinstance(looked, Sequence) and [share for share in looked if isinstance(share, int | float)]
        if not shares or not len(looked) == len(shares) == rows or not all(0 <= share <= 1 for share in shares):
            refuse(f"{said(looked)} as confidences", f"return {rows} numbers from 0 to 1 for each check")


def _holds(x: Any, kind: mx.DtypeCategory) -> bool:
    return isinstance(x, mx.array) and mx.issubdtype(x.dtype, kind)
