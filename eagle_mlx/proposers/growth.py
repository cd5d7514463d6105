"""Growing a draft tree: level by level, always below the nodes that are likeliest to be reached.

Source: Li et al. 2024, EAGLE-2, section 4: expansion by joint probability, then the best nodes of the whole tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from eagle_mlx.cache import RaggedCache
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.tree import Branches, Tree

_LEAST = -50.0
"""The least logarithm of a share: what is less likely is not drafted anyway."""
_STEP = 1e-3
"""What a node costs more than its parent at least, so that parents come before their children."""

Scores = Callable[[mx.array, int], mx.array]
"""Hidden states [B, n, H] and how many draft tokens stand before what is drawn there -> log shares [B, n, Vd]."""


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
    def text(cls, rows: int) -> Nodes:
        """What the first tokens hang below."""
        none = mx.full((rows, 1), -1, mx.int32)
        return cls(none, mx.zeros((rows, 1)), none, none)

    def at(self, picked: mx.array) -> Nodes:
        """Those at the places [B, m] of this level."""
        return Nodes(*(mx.take_along_axis(x, picked, axis=1) for x in vars(self).values()))


def grow(
    head: DraftHead, cache: RaggedCache, hidden: mx.array, scores: Scores, levels: int, width: int, nodes: int
) -> tuple[mx.array, Tree]:
    """A tree of `nodes` tokens, at most `levels` deep, with up to `width` nodes expanded at each level.

    hidden: [B, 1, H], from which the first tokens are drawn; cache: the head's, which the nodes that were expanded stay
    in. Returns tokens [B, nodes] in the target's ids, likeliest first, and the tree. There are no more nodes than
    width + (levels - 1) * width^2.
    """
    rows = hidden.shape[0]
    eye = mx.broadcast_to(mx.eye(width, dtype=mx.bool_), (rows, width, width))
    frontier = children_of(Nodes.text(rows), scores(hidden, 0), width, head.token_ids, 0)
    pool, seen = [frontier], eye
    g = mx.broadcast_to(hidden, (rows, width, hidden.shape[-1]))
    for level in range(1, levels):
        depths = mx.repeat(mx.arange(level, dtype=mx.int32), width)
        cache.branch(Branches(seen, mx.broadcast_to(depths, (rows, level * width))))
        h = head(head.embed(frontier.tokens), g, cache)
        cache.advance(width)
        first = sum(level.tokens.shape[1] for level in pool)
        pool.append(children_of(frontier, scores(h, level), width, head.token_ids, first))
        mx.async_eval(pool[-1].scores)  # the device drafts while the host builds the next level
        picked = _top(pool[-1].scores, width)
        frontier, below = pool[-1].at(picked), picked // width
        g = mx.take_along_axis(h, below[..., None], axis=1)
        seen = mx.concatenate([mx.take_along_axis(seen, below[..., None], axis=1), eye], axis=-1)
    return best_of(pool, nodes, levels)


def width_for(nodes: int, levels: int) -> int:
    """Nodes to expand at each level for a tree of so many: enough to have that many, and a choice among them."""
    width = max(2, math.isqrt(nodes))
    while width + (levels - 1) * width**2 < nodes:
        width += 1
    return width


def children_of(parents: Nodes, shares: mx.array, width: int, token_ids: mx.array | None, first: int) -> Nodes:
    """The `width` likeliest tokens below each of n nodes, by log shares [B, n, Vd], in the pool from `first` on."""
    rows, count, _ = shares.shape
    ids = _top(shares, width)
    step = mx.clip(mx.take_along_axis(shares, ids, axis=-1), _LEAST, 0.0) - _STEP
    places = mx.broadcast_to(mx.arange(first, first + count * width, dtype=mx.int32), (rows, count * width))
    return Nodes(
        (ids if token_ids is None else token_ids[ids]).astype(mx.int32).reshape(rows, -1),
        (parents.scores[..., None] + step).reshape(rows, -1),
        mx.repeat(parents.places, width, axis=1),
        places,
    )


def best_of(pool: Sequence[Nodes], nodes: int, levels: int) -> tuple[mx.array, Tree]:
    """The likeliest nodes of all levels: a tree, since no node is likelier than its parent."""
    tokens, scores, parents = (
        mx.concatenate([getattr(level, name) for level in pool], axis=1) for name in ("tokens", "scores", "parents")
    )
    order = mx.argsort(-scores, axis=1)[:, :nodes]
    rank = mx.arange(1, order.shape[1] + 1, dtype=mx.int32)
    # Place -1, the text, is the last of one place more than there are nodes: its rank is that of node 0.
    ranks = mx.put_along_axis(
        mx.zeros((scores.shape[0], scores.shape[1] + 1), mx.int32), order, mx.broadcast_to(rank, order.shape), axis=1
    )
    above = mx.take_along_axis(parents, order, axis=1) % ranks.shape[1]
    return mx.take_along_axis(tokens, order, axis=1), Tree(mx.take_along_axis(ranks, above, axis=1), levels)


def _top(x: mx.array, count: int) -> mx.array:
    """The places of the `count` greatest along the last axis, in any order."""
    if count >= x.shape[-1]:
        return mx.broadcast_to(mx.arange(x.shape[-1]), x.shape)
    return mx.argpartition(-x, count, axis=-1)[..., :count]
