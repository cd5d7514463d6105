"""Growing a draft tree: side branches of a chain, or level by level below the nodes that are likeliest to be reached.

Source: Li et al. 2024, EAGLE-2, section 4: expansion by joint probability, then the best nodes of the whole tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from eagle_mlx.cache import RaggedCache
from eagle_mlx.cpu import fastmath
from eagle_mlx.decoding.draft import Branches, Tree
from eagle_mlx.decoding.filters import largest
from eagle_mlx.heads.base import DraftHead

_LEAST = -50.0
"""The least logarithm of a share: what is less likely is not drafted anyway."""
_STEP = 1e-3
"""What a node costs more than its parent at least, so that parents come before their children."""

ScoreFn = Callable[[mx.array, int], mx.array]
"""Hidden states [B, n, H] and how many draft tokens stand before what is drawn there -> logits of shares [B, n, Vd]."""


@dataclass(frozen=True)
class Nodes:
    """Candidates of one level, all arrays [B, n]."""

    tokens: mx.array
    """int32, in the target's ids."""
    scores: mx.array
    """float32, the logarithm of the chance that the whole branch down to here stands."""
    parents: mx.array
    """int32, places in the pool; -1 below the text."""
    places: mx.array
    """int32, their own."""

    @classmethod
    def root(cls, rows: int) -> Nodes:
        """The parent of the first tokens: the text so far."""
        none = mx.full((rows, 1), -1, mx.int32)
        return cls(none, mx.zeros((rows, 1)), none, none)

    def at(self, picked: mx.array) -> Nodes:
        """Those at the places [B, m] of this level."""
        return Nodes(*(mx.take_along_axis(x, picked, axis=1) for x in vars(self).values()))


@dataclass(frozen=True)
class TreeShape:
    """The shape of a tree: nodes that are expanded at each level, and the children that each of them has."""

    width: int
    children: int

    @classmethod
    def of(cls, nodes: int, levels: int) -> TreeShape:
        """For a tree of so many tokens: enough candidates for it, and a choice among them.

        Up to two tokens a level are drafted best as a chain with side branches: that takes no more steps of the
        head than the chain alone.
        """
        width = 1 if nodes <= 2 * levels else max(2, math.isqrt(2 * nodes // 3))
        shape = cls(width, width + 2)
        while shape.candidates(levels) < nodes:
            shape = cls(shape.width + 1, shape.children + 1)
        return shape

    def candidates(self, levels: int) -> int:
        return self.children + (levels - 1) * self.width * self.children


@dataclass(frozen=True)
class ChainCandidates:
    """The likeliest tokens at each place of a chain of the likeliest."""

    ids: mx.array
    """[B, levels, n] int32, in the draft's ids."""
    joint: mx.array
    """[B, levels, n] float32, the logarithm of the chance that the chain stands down to there, and then this token."""
    best: mx.array
    """[B, levels], which of them is the chain's."""

    @classmethod
    def of(cls, scores: mx.array, count: int) -> ChainCandidates:
        """scores: [B, levels, Vd], logits of the shares of what stands at each place of the chain."""
        ids, steps = _likeliest(scores, min(count, scores.shape[-1]))
        so_far = mx.cumsum(mx.max(steps, axis=-1), axis=1)
        return cls(ids, steps + mx.pad(so_far[:, :-1], [(0, 0), (1, 0)])[..., None], mx.argmax(steps, axis=-1))


def side_branch_tree(scores: mx.array, nodes: int, children: int, token_ids: mx.array | None) -> tuple[mx.array, Tree]:
    """A tree of `nodes` tokens: the best of a chain of the likeliest, and of the likeliest side branches.

    scores: as of `ChainCandidates.of`; children: candidates at each place, the chain's included; the rest as of
    `grow_tree`.
    """
    rows, levels, _ = scores.shape
    found = ChainCandidates.of(scores, children)
    count = found.ids.shape[-1]
    chain = found.best + count * mx.arange(levels)
    above = mx.pad(chain[:, :-1], [(0, 0), (1, 0)], constant_values=mx.array(-1, chain.dtype)).astype(mx.int32)
    places = mx.broadcast_to(mx.arange(levels * count, dtype=mx.int32), (rows, levels * count))
    tokens = _in_target(found.ids, token_ids)
    pool = Nodes(tokens.reshape(rows, -1), found.joint.reshape(rows, -1), mx.repeat(above, count, axis=1), places)
    return best_of([pool], nodes, levels)


def grow_tree(
    head: DraftHead, cache: RaggedCache, hidden: mx.array, scores: ScoreFn, levels: int, nodes: int
) -> tuple[mx.array, Tree]:
    """A tree of `nodes` tokens, at most `levels` deep.

    hidden: [B, 1, H], from which the first tokens are drawn; cache: the head's, which the nodes that were expanded stay
    in. Returns tokens [B, nodes] in the target's ids, likeliest first, and the tree.
    """
    shape, rows = TreeShape.of(nodes, levels), hidden.shape[0]
    width = shape.width
    pool = [children_of(Nodes.root(rows), scores(hidden, 0), shape.children, head.token_ids, 0)]
    frontier = pool[0].at(_top(pool[0].scores, width))
    width = frontier.tokens.shape[1]
    seen = eye = mx.broadcast_to(mx.eye(width, dtype=mx.bool_), (rows, width, width))
    g = mx.broadcast_to(hidden, (rows, width, hidden.shape[-1]))
    for level in range(1, levels):
        depths = [depth for depth in range(level) for _ in range(width)]
        cache.branch(Branches(seen, mx.array([depths] * rows, mx.int32)))
        h = head(head.embed(frontier.tokens), g, cache)
        cache.advance(width)
        first = sum(level.tokens.shape[1] for level in pool)
        pool.append(children_of(frontier, scores(h, level), shape.children, head.token_ids, first))
        mx.async_eval(pool[-1].scores)  # the device drafts while the host builds the next level
        picked = _top(pool[-1].scores, width)
        frontier, below = pool[-1].at(picked), picked // (pool[-1].tokens.shape[1] // width)
        g = mx.take_along_axis(h, below[..., None], axis=1)
        seen = mx.concatenate([mx.take_along_axis(seen, below[..., None], axis=1), eye], axis=-1)
    return best_of(pool, nodes, levels)


def children_of(parents: Nodes, scores: mx.array, width: int, token_ids: mx.array | None, first: int) -> Nodes:
    """The `width` likeliest tokens below each of n nodes, by logits [B, n, Vd], in the pool from `first` on."""
    rows, count, vocab = scores.shape
    width = min(width, vocab)
    ids, steps = _likeliest(scores, width)
    places = mx.broadcast_to(mx.arange(first, first + count * width, dtype=mx.int32), (rows, count * width))
    return Nodes(
        _in_target(ids, token_ids).reshape(rows, -1),
        (parents.scores[..., None] + steps).reshape(rows, -1),
        mx.repeat(parents.places, width, axis=1),
        places,
    )


def best_of(pool: Sequence[Nodes], nodes: int, levels: int) -> tuple[mx.array, Tree]:
    """The likeliest nodes of all levels: a tree, since no node is likelier than its parent."""
    tokens, scores, parents = (
        mx.concatenate([getattr(level, name) for level in pool], axis=1) for name in ("tokens", "scores", "parents")
    )
    order = mx.argsort(-scores, axis=1)[:, :nodes]
    ordered = mx.take_along_axis(scores, order, axis=1)
    rank = mx.arange(1, order.shape[1] + 1, dtype=mx.int32)
    # Place -1, the text, is the last of one place more than there are nodes: its rank is that of node 0.
    ranks = mx.put_along_axis(
        mx.zeros((scores.shape[0], scores.shape[1] + 1), mx.int32), order, mx.broadcast_to(rank, order.shape), axis=1
    )
    above = mx.take_along_axis(parents, order, axis=1) % ranks.shape[1]
    return mx.take_along_axis(tokens, order, axis=1), Tree(mx.take_along_axis(ranks, above, axis=1), levels, ordered)


def _likeliest(scores: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The draft ids [B, n, count] of the greatest logits [B, n, Vd], and what each adds to a branch's score."""
    greatest, ids = largest(scores, count)
    return ids, mx.clip(greatest - fastmath.log_sum_exp(scores), _LEAST, 0.0) - _STEP


def _in_target(ids: mx.array, token_ids: mx.array | None) -> mx.array:
    return (ids if token_ids is None else token_ids[ids]).astype(mx.int32)


def _top(x: mx.array, count: int) -> mx.array:
    """The places of the `count` greatest along the last axis, in any order."""
    return largest(x, min(count, x.shape[-1]))[1]
