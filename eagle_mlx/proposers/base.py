"""What every way to draft has in common: the protocol between a proposer and the engine, and the check of a draft.

A proposer is shared by all batches; what it knows of a batch's rows lives in a state that it opens for them. Per round
the engine calls `draft`, verifies, and calls `observe` with what the rows have become. A third party's proposer
needs no base class, only these methods; `ngram.py` is the shortest example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol, Self, runtime_checkable

import mlx.core as mx

from eagle_mlx.cache.ragged import CacheSize
from eagle_mlx.decoding.draft import Draft, Tree
from eagle_mlx.decoding.masks import said
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.errors import ProposerError
from eagle_mlx.plan import Abilities, Plan
from eagle_mlx.target import Target


@dataclass(frozen=True)
class Observation:
    """Positions that the target has read since the last observation, the same for every layer of interest."""

    tokens: Sequence[Sequence[int]]
    """Row by row, the token that follows each of those positions; none in a row that sat the round out, because its
    grammar's masks were late."""
    aux: tuple[mx.array, ...]
    """The proposer's aux layers at those positions, each [B, L, H], right-padded."""


class ProposerState(Protocol):
    def prefill(self, seen: Observation) -> None:
        """The target has read a chunk of the prompts that the state was opened with; without aux layers it has none."""

    def draft(self, plan: Plan, sampling: SamplingBatch, positions: mx.array) -> Draft:
        """Draft what the plan asks for behind each row, or the nearest less that this proposer can; depth is >= 1.

        Where `plan.stop_below` is given, a chain ends when the mean confidence of the rows falls below it, by the
        proposer's own reckoning of the token `CONFIDENCE_LAG` before the newest. What has been drafted by then is kept:
        to keep or drop a token for what it is would change what is emitted where tokens are drawn.

        `positions` [B] int32: the index in its sequence of each row's first draft token, which keys the noise.
        """

    def observe(self, seen: Observation) -> None:
        """Take note of what the target has read and of the tokens that follow."""

    def append(self, other: ProposerState) -> None:
        """The other state's rows join behind this one's."""

    def remove(self, row: int) -> None:
        """A row leaves; the last one takes its place."""


class StatePiece(Protocol):
    """What a state keeps of some positions of a row's text, one behind the other."""

    @property
    def arrays(self) -> list[mx.array]:
        """All of it that is on the device."""
        ...

    def split(self, at: int) -> tuple[Self, Self]:
        """The first `at` positions and the others; this one is given away."""
        ...


@runtime_checkable
class Separable(Protocol):
    """What a state that reads the target's hidden states must have for the prefix cache to keep its pasts."""

    def length(self, row: int) -> int:
        """Positions of the row's text that it has read."""
        ...

    def piece(self, row: int, start: int, end: int) -> StatePiece:
        """What it keeps of the positions `start` to `end` of a row's text, in arrays of its own."""
        ...


@runtime_checkable
class CanJoin(Protocol):
    """What the proposer of such states must have."""

    def join(self, pieces: Sequence[StatePiece], length: int, prompt: Sequence[int] = ()) -> ProposerState:
        """A state of one row that has read the first `length` positions of a text, which is to be this prompt's.

        The pieces begin with it, and hold at least these positions. Who takes the row over reads at least one more.
        """
        ...


@runtime_checkable
class Movable(Protocol):
    """What a state must have for its rows to be decoded in two groups: the others then stay in one."""

    def take(self, row: int) -> ProposerState:
        """A row leaves, as with `remove`, which is not the only one; a state that knows what this one knew of it."""
        ...


@runtime_checkable
class HasModel(Protocol):
    """What a proposer with a model of its own may have, so that its bytes are counted. It is bound when asked."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a round reads beyond the target's."""
        ...

    def cache_size(self) -> CacheSize:
        """What its caches take."""
        ...


class Proposer(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers, counted from 0, whose outputs `observe` needs."""

    @property
    def abilities(self) -> Abilities:
        """What its drafts can be beside chains of a depth that is known before."""

    def bind(self, target: Target) -> None:
        """Called once, when the engine is built. Raises an EagleError where the target does not fit."""

    def open(self, prompts: Sequence[Sequence[int]]) -> ProposerState:
        """A state for new rows, of which the target has read nothing yet."""


_SUM_TOLERANCE = 1e-3
"""How far the probabilities of a position may be from 1 together: float32 over a large vocabulary is much nearer."""


@dataclass(frozen=True)
class Asked:
    """What was asked of a proposer."""

    proposer: str
    """Its name, for errors."""
    plan: Plan
    rooms: Sequence[int]
    """Row by row, the draft tokens of a chain that there is a use for."""
    vocab: int


def check_draft(draft: Draft, asked: Asked, last: mx.array, rejects: mx.array | None) -> Draft:
    """The draft with what cannot be used cut away, so that whatever it says, the text is the target's own.

    A row's draft ends before the first id that the target does not have, and before the first position whose
    probabilities are none. Lengths are brought between 0 and what there is and is asked for; tokens beyond that are
    cut. The values are looked at on the device, and nothing is waited for.

    last: [B, 1] int32, each row's newest token, which stands where no draft token does; rejects: [B] bool, the rows
    that are judged by probabilities, None where none is. Raises ProposerError for shapes and types that cannot be used.
    """
    _check_arrays(draft, asked)
    width = min(draft.tokens.shape[1], asked.plan.size)
    if not width:
        none = mx.zeros((len(asked.rooms),), mx.int32)
        return Draft(mx.zeros((none.size, 0), mx.int32), none, confidences=draft.confidences)
    tokens = draft.tokens[:, :width].astype(mx.int32)
    legal = tokens.astype(mx.uint32) < asked.vocab  # what is negative becomes large
    probs = None
    if draft.probs is not None and rejects is not None:
        probs = draft.probs[:, :width].astype(mx.float32)
        legal = legal & (_are_probabilities(probs, tokens) | ~rejects[:, None])
    places = mx.arange(width, dtype=mx.int32)
    lengths = mx.clip(draft.lengths.astype(mx.int32), 0, _most(draft, asked, width))
    lengths = mx.min(mx.where(legal, lengths[:, None], places), axis=1)
    tokens = mx.where(places < lengths[:, None], tokens, last)
    tree = None if draft.tree is None else _cut_tree(draft.tree, asked, width)
    return replace(draft, tokens=tokens, lengths=lengths, probs=probs, tree=tree)


def _most(draft: Draft, asked: Asked, width: int) -> int | mx.array:
    """How long the rows' drafts may be; in a tree, the verify looks at each node's depth instead."""
    rooms = asked.rooms if draft.tree is None else [width if room > 0 else 0 for room in asked.rooms]
    return width if min(rooms) >= width else mx.array([min(room, width) for room in rooms], mx.int32)


def _are_probabilities(probs: mx.array, tokens: mx.array) -> mx.array:
    """Whether each position's are a distribution that its token may have been drawn from. Returns [B, k] bool."""
    in_range = mx.clip(tokens, 0, probs.shape[-1] - 1)
    drawn = mx.take_along_axis(probs, in_range[..., None], axis=-1)[..., 0]
    whole = mx.abs(probs.sum(axis=-1) - 1) < _SUM_TOLERANCE  # false where one of them is not a number
    return whole & (probs.min(axis=-1) >= 0) & (drawn > 0)


def _cut_tree(tree: Tree, asked: Asked, width: int) -> Tree:
    """The tree of the first `width` tokens. A parent that does not come before its child becomes one that does: that is
    another tree, and every tree is judged rightly.
    """
    parents = mx.clip(tree.parents[:, :width].astype(mx.int32), 0, mx.arange(width, dtype=mx.int32))
    return Tree(parents, min(tree.levels, asked.plan.depth, width))


def _check_arrays(draft: Any, asked: Asked) -> None:
    """Raise ProposerError where the parts of a draft are not what they have to be; nothing on the device is read."""

    def refuse(what: str, wanted: str) -> NoReturn:
        raise ProposerError(f"the proposer {asked.proposer!r} gave {what}; {wanted}")

    rows = len(asked.rooms)
    if not isinstance(draft, Draft):
        refuse(
            f"{draft!r:.80} as a draft", "give an eagle_mlx.proposers.base.Draft, with no tokens where none are known"
        )
    tokens, lengths, probs, tree = draft.tokens, draft.lengths, draft.probs, draft.tree
    if not _holds(tokens, mx.integer) or tokens.ndim != 2 or tokens.shape[0] != rows:
        refuse(f"{said(tokens)} as tokens", f"give [{rows}, k] int32, a line for each row")
    if not _holds(lengths, mx.integer) or lengths.shape != (rows,):
        refuse(f"{said(lengths)} as lengths", f"give [{rows}] int32, how many of each row's tokens count")
    wanted = (*tokens.shape, asked.vocab)
    if probs is not None and (not _holds(probs, mx.floating) or probs.shape != wanted):
        refuse(f"{said(probs)} as probs", f"give {list(wanted)} float32, or None where nothing was drawn")
    if tree is not None:
        if not asked.plan.is_tree:
            refuse("a tree where a chain was asked for", "give one only where plan.is_tree")
        if not _holds(tree.parents, mx.integer) or tree.parents.shape != tokens.shape:
            refuse(f"{said(tree.parents)} as a tree's parents", f"give {list(tokens.shape)} int32, one for each token")
        if not isinstance(tree.levels, int) or tree.levels < 1:
            refuse(f"{tree.levels!r} as a tree's levels", "give a bound of its depth, at least 1")
    for looked in draft.confidences:
        if len(looked) != rows or not all(0 <= confidence <= 1 for confidence in looked):
            refuse(f"{looked!r:.80} as confidences", f"give {rows} numbers from 0 to 1 for each look")


def _holds(x: Any, kind: mx.DtypeCategory) -> bool:
    return isinstance(x, mx.array) and mx.issubdtype(x.dtype, kind)
