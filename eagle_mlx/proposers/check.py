"""What a proposer gave, made fit for a verify: a poor draft costs time and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import mlx.core as mx

from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.tree import Tree
from eagle_mlx.errors import ProposerError
from eagle_mlx.plan import Plan

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
        refuse(f"{_said(tokens)} as tokens", f"give [{rows}, k] int32, a line for each row")
    if not _holds(lengths, mx.integer) or lengths.shape != (rows,):
        refuse(f"{_said(lengths)} as lengths", f"give [{rows}] int32, how many of each row's tokens count")
    wanted = (*tokens.shape, asked.vocab)
    if probs is not None and (not _holds(probs, mx.floating) or probs.shape != wanted):
        refuse(f"{_said(probs)} as probs", f"give {list(wanted)} float32, or None where nothing was drawn")
    if tree is not None:
        if not asked.plan.is_tree:
            refuse("a tree where a chain was asked for", "give one only where plan.is_tree")
        if not _holds(tree.parents, mx.integer) or tree.parents.shape != tokens.shape:
            refuse(f"{_said(tree.parents)} as a tree's parents", f"give {list(tokens.shape)} int32, one for each token")
        if not isinstance(tree.levels, int) or tree.levels < 1:
            refuse(f"{tree.levels!r} as a tree's levels", "give a bound of its depth, at least 1")
    for looked in draft.confidences:
        if len(looked) != rows or not all(0 <= confidence <= 1 for confidence in looked):
            refuse(f"{looked!r:.80} as confidences", f"give {rows} numbers from 0 to 1 for each look")


def _holds(x: Any, kind: mx.DtypeCategory) -> bool:
    return isinstance(x, mx.array) and mx.issubdtype(x.dtype, kind)


def _said(x: Any) -> str:
    """What something is, in an error."""
    return f"{list(x.shape)} {str(x.dtype).removeprefix('mlx.core.')}" if isinstance(x, mx.array) else f"{x!r:.80}"
