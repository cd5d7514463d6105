"""Draw drafts from logits: a chain of tokens one by one, a block in one forward, or a tree.

A tree is a chain with side branches, or grows level by level from the most likely nodes. Source: Li et al. 2024,
EAGLE-2, section 4: expansion by joint probability, then the best nodes of the whole tree.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from eagle_mlx.cache import RaggedCache
from eagle_mlx.decoding.draft import Branches, Draft, Tree
from eagle_mlx.decoding.filters import largest
from eagle_mlx.decoding.sampling import SamplingBatch, draft_sample, draft_scores, surprise_of
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.block import BlockHead
from eagle_mlx.heads.eagle3.head import PEagleHead
from eagle_mlx.plan import CONFIDENCE_LAG, Plan

Forward = Callable[[mx.array | None], mx.array]
"""Takes the newest tokens [B, 1], None before the first; returns logits [B, 1, Vd] for the next token."""
_LEAST = -50.0
"""Minimum log probability of a token. Less likely tokens are not drafted anyway."""
_STEP = 1e-3
"""Minimum difference between the scores of a node and its parent, so that parents sort before their children."""

ScoreFn = Callable[[mx.array, int], mx.array]
"""Takes hidden states [B, n, H] and the number of draft tokens before them; returns logits [B, n, Vd]."""


class Draws(ABC):
    """The tokens of a chain: how to draw them, and when to stop.

    With `stop_below`, the chain ends when the proposer's confidence is low. The confidence of a token is the product of
    the maximum probabilities up to it, whichever tokens were sampled.
    """

    def __init__(
        self,
        sampling: SamplingBatch,
        positions: mx.array,
        vocab: int,
        token_ids: mx.array | None = None,
        stop_below: float | None = None,
    ):
        """positions: [B] int32, of the chain's first token; vocab and token_ids as in `draft_sample`."""
        self.sampling, self._positions = sampling, positions
        self._vocab, self.token_ids = vocab, token_ids
        self._stop_below = stop_below
        self._surprises: list[mx.array] = []
        """For each token, the negative logarithm of its confidence, [B, 1]; empty without `stop_below`."""
        self.confidences: list[list[float]] = []  # as in `Draft`
        self._kept: list[mx.array] = []  # for each token, the distributions or scores that a subclass keeps, [B, 1, V]

    @abstractmethod
    def __call__(self, logits: mx.array, step: int | mx.array) -> mx.array:
        """Take logits [B, n, Vd] and their positions in the chain, an int or [n]; return target ids [B, n] int32."""

    def changed(self, logits: mx.array, drafted: list[mx.array]) -> mx.array:
        """Return logits [B, 1, Vd] after these draft tokens with the requests' penalties and biases."""
        changes = self.sampling.changes
        return logits if changes is None else changes(logits, drafted, self.token_ids)

    def chain(self, depth: int, forward: Forward) -> list[mx.array]:
        """Draw up to `depth` tokens, [B, 1] int32 each. The device drafts while the host builds the next step."""
        tokens: list[mx.array] = []
        while len(tokens) < depth and not self._should_stop():
            logits = self.changed(forward(tokens[-1] if tokens else None), tokens)
            tokens.append(self(logits, len(tokens)))
            if self._stop_below is not None:
                surprise = surprise_of(logits, self.sampling)
                self._surprises.append(self._surprises[-1] + surprise if self._surprises else surprise)
            mx.async_eval(tokens[-1], *self._surprises[-1:])
        return tokens

    def _should_stop(self) -> bool:
        """Wait for the confidence of the token CONFIDENCE_LAG steps back."""
        last = len(self._surprises) - CONFIDENCE_LAG - 1
        if last < 0 or self._stop_below is None:
            return False
        surprises = cast(list[list[float]], self._surprises[last].tolist())
        self.confidences.append([0.0 if math.isnan(surprise) else math.exp(-surprise) for (surprise,) in surprises])
        return sum(self.confidences[-1]) < self._stop_below * len(surprises)


class ChainSampler(Draws):
    """Samples tokens with each row's parameters, and keeps the distributions that rejection sampling needs."""

    def __call__(self, logits: mx.array, step: int | mx.array) -> mx.array:
        at = self._positions[:, None]
        if not self.sampling.all_greedy:  # greedy rows draw no noise
            at = at + step
        token, q = draft_sample(logits, self.sampling, at, self._vocab, self.token_ids)
        self._kept += [] if q is None else [q]
        return token

    @property
    def probs(self) -> mx.array | None:
        """The distributions [B, k, V] float32 of all tokens; None if no row needs them."""
        return mx.concatenate(self._kept, axis=1) if self._kept else None


class TreeScorer(Draws):
    """Selects the most likely tokens, and keeps all scores for side branches."""

    def of(self, logits: mx.array, step: int | mx.array) -> mx.array:
        """Return `draft_scores` of nodes [B, n, Vd] at depth `step`, which share their noise."""
        at = self._positions[:, None] + step
        return draft_scores(logits, self.sampling, at, self._vocab, self.token_ids)

    def __call__(self, logits: mx.array, step: int | mx.array) -> mx.array:
        self._kept.append(self.of(logits, step))
        best = mx.argmax(self._kept[-1], axis=-1).astype(mx.int32)
        return best if self.token_ids is None else self.token_ids[best]

    @property
    def levels(self) -> mx.array:
        """Scores [B, levels, Vd] float32 at all chain positions."""
        return mx.concatenate(self._kept, axis=1)


@dataclass(frozen=True)
class Nodes:
    """Candidates of one level; all arrays are [B, n]."""

    tokens: mx.array  # int32, target ids
    scores: mx.array  # float32, the log probability that the whole branch is accepted
    parents: mx.array  # int32, index of the parent in the pool; -1 for the text
    places: mx.array  # int32, own index in the pool

    @classmethod
    def root(cls, rows: int) -> Nodes:
        """Return the parent of the first tokens: the text so far."""
        none = mx.full((rows, 1), -1, mx.int32)
        return cls(none, mx.zeros((rows, 1)), none, none)

    def at(self, picked: mx.array) -> Nodes:
        """Return the nodes at the indices [B, m] of this level."""
        return Nodes(*(mx.take_along_axis(x, picked, axis=1) for x in vars(self).values()))


@dataclass(frozen=True)
class TreeShape:
    """The number of nodes expanded at each level, and the number of children of each."""

    width: int
    children: int

    @classmethod
    def of(cls, nodes: int, levels: int) -> TreeShape:
        """Return a shape with enough candidates for a tree of `nodes` tokens.

        Up to two tokens per level, a chain with side branches is best: it takes no more steps of the head than a chain.
        """
        width = 1 if nodes <= 2 * levels else max(2, math.isqrt(2 * nodes // 3))
        shape = cls(width, width + 2)
        while shape.candidates(levels) < nodes:
            shape = cls(shape.width + 1, shape.children + 1)
        return shape

    def candidates(self, levels: int) -> int:
        return self.children + (levels - 1) * self.width * self.children


def draft_chain(
    plan: Plan,
    draw: Callable[[Draws], list[mx.array]],
    ready: mx.array,
    sampling: SamplingBatch,
    positions: mx.array,
    vocab: int,
    token_ids: mx.array | None = None,
) -> Draft:
    """Return the chain that `draw` draws, or, if the plan wants a tree, the best of it and its side branches.

    draw: returns the chain's tokens, [B, n] int32 each; ready: [B] int32, 1 for rows that draft, else 0; the others as
    in `Draws`.
    """
    if not plan.is_tree:
        sampler = ChainSampler(sampling, positions, vocab, token_ids, plan.stop_below)
        tokens = mx.concatenate(draw(sampler), axis=1)
        return Draft(tokens, tokens.shape[1] * ready, sampler.probs, confidences=sampler.confidences)
    scorer = TreeScorer(sampling, positions, vocab, token_ids)
    draw(scorer)
    levels = scorer.levels
    children = max(TreeShape.of(plan.nodes, plan.depth).children, -(-plan.nodes // levels.shape[1]))
    tokens, tree = side_branch_tree(levels, plan.nodes, children, token_ids)
    return Draft(tokens, tokens.shape[1] * ready, tree=tree)


def draw_block(
    head: BlockHead | PEagleHead, states: mx.array, newest: mx.array, drafts: int, draw: Draws
) -> list[mx.array]:
    """Return a block's tokens as they were drawn, [B, n] int32 each.

    states: [B, n, H], the states of the slots, the last `drafts` of which draft; newest: [B, 1] int32, each row's
    newest token, for heads whose slots depend on the token before them.
    """
    h = states[:, -drafts:]
    logits = head.logits(h)
    sequential = head if isinstance(head, BlockHead) and head.is_sequential else None
    if sequential is None and draw.sampling.changes is None:
        return [draw(logits, mx.arange(drafts, dtype=mx.int32))]
    previous, state, candidates = newest, None, None
    if sequential is not None and (count := sequential.config.selector_top_k):
        candidates = largest(logits, count)[1]
    elif sequential is not None and not sequential.config.first_slot_drafts:  # its state begins at the first slot
        _, state = sequential.markov_head.step(previous, states[:, :1], None)
    tokens = list[mx.array]()
    for slot in range(drafts):  # in turn, because penalties and such heads depend on the tokens before
        at = slice(slot, slot + 1)
        final = logits[:, at]
        if sequential is not None:
            among = None if candidates is None else candidates[:, at]
            final, state = sequential.slot_logits(previous, h[:, at], final, state, among)
        previous = draw(draw.changed(final, tokens), slot)
        tokens.append(previous)
    return tokens


def side_branch_tree(scores: mx.array, nodes: int, children: int, token_ids: mx.array | None) -> tuple[mx.array, Tree]:
    """Return a tree of `nodes` tokens: the best of a greedy chain and its most likely side branches.

    scores: logits [B, levels, Vd] at the chain's positions; children: candidates at each position, including the
    chain's own. The result is as in `grow_tree`.
    """
    rows, levels, vocab = scores.shape
    ids, steps = _likeliest(scores, min(children, vocab))
    count = ids.shape[-1]
    before = mx.pad(mx.cumsum(mx.max(steps, axis=-1), axis=1)[:, :-1], [(0, 0), (1, 0)])  # of the chain so far
    chain = mx.argmax(steps, axis=-1) + count * mx.arange(levels)
    above = mx.pad(chain[:, :-1], [(0, 0), (1, 0)], constant_values=mx.array(-1, chain.dtype)).astype(mx.int32)
    places = mx.broadcast_to(mx.arange(levels * count, dtype=mx.int32), (rows, levels * count))
    tokens, joint = _in_target(ids, token_ids), steps + before[..., None]
    pool = Nodes(tokens.reshape(rows, -1), joint.reshape(rows, -1), mx.repeat(above, count, axis=1), places)
    return best_of([pool], nodes, levels)


def grow_tree(
    head: DraftHead, cache: RaggedCache, hidden: mx.array, scores: ScoreFn, levels: int, nodes: int
) -> tuple[mx.array, Tree]:
    """Return a tree of `nodes` tokens, at most `levels` deep.

    hidden: [B, 1, H], for the first tokens; cache: the head's, in which expanded nodes stay. Returns tokens [B, nodes]
    in target ids, most likely first, and the tree.
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
    """Return the `width` most likely children of each node, by logits [B, n, Vd]. Pool indices start at `first`."""
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
    """Return the most likely nodes of all levels. They form a tree, since no node is more likely than its parent."""
    tokens, scores, parents = (
        mx.concatenate([getattr(level, name) for level in pool], axis=1) for name in ("tokens", "scores", "parents")
    )
    order = mx.argsort(-scores, axis=1)[:, :nodes]
    rank = mx.arange(1, order.shape[1] + 1, dtype=mx.int32)
    # Index -1 (the text) wraps to the extra last place, whose rank is 0.
    ranks = mx.put_along_axis(
        mx.zeros((scores.shape[0], scores.shape[1] + 1), mx.int32), order, mx.broadcast_to(rank, order.shape), axis=1
    )
    above = mx.take_along_axis(parents, order, axis=1) % ranks.shape[1]
    return mx.take_along_axis(tokens, order, axis=1), Tree(mx.take_along_axis(ranks, above, axis=1), levels)


def _likeliest(scores: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Return the draft ids [B, n, count] of the largest logits [B, n, Vd], and their log probabilities."""
    greatest, ids = largest(scores, count)
    return ids, mx.clip(greatest - mx.logsumexp(scores, axis=-1, keepdims=True), _LEAST, 0.0) - _STEP


def _in_target(ids: mx.array, token_ids: mx.array | None) -> mx.array:
    return (ids if token_ids is None else token_ids[ids]).astype(mx.int32)


def _top(x: mx.array, count: int) -> mx.array:
    """Return the indices of the `count` largest along the last axis, in any order."""
    return largest(x, min(count, x.shape[-1]))[1]
