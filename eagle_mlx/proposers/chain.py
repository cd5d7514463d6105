"""A chain of draft tokens: drawn one after the other, for as long as the next one is worth it."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from typing import cast

import mlx.core as mx

from eagle_mlx.policy.base import BEHIND, Beside, Enough
from eagle_mlx.proposers.base import Draft
from eagle_mlx.proposers.growth import flanked
from eagle_mlx.sampling import SamplingBatch, doubt_of, draft_sample, draft_scores
from eagle_mlx.tree import Tree

Forward = Callable[[mx.array | None], mx.array]
"""The chain's newest tokens [B, 1], None before the first -> logits [B, 1, Vd] of what follows."""
Draw = Callable[[mx.array, int], mx.array]
"""Logits [B, 1, Vd] and the token's place in the chain -> the token [B, 1] int32 in the target's ids."""


class Draws:
    """Draws tokens as each row's parameters say, and keeps the distributions where a row is judged by them."""

    def __init__(self, sampling: SamplingBatch, positions: mx.array, vocab: int, token_ids: mx.array | None = None):
        """positions: [B] int32, of the chain's first token; the rest as of `draft_sample`."""
        self._sampling, self._positions, self._vocab, self._token_ids = sampling, positions, vocab, token_ids
        self._probs: list[mx.array] = []

    def __call__(self, logits: mx.array, step: int) -> mx.array:
        at = self._positions[:, None] + step
        token, q = draft_sample(logits, self._sampling, at, self._vocab, self._token_ids)
        self._probs += [] if q is None else [q]
        return token

    def draft(self, tokens: list[mx.array], lengths: mx.array, gauge: Gauge | None = None) -> Draft:
        """What was drawn, as far as the chain goes."""
        probs = mx.concatenate(self._probs[: len(tokens)], axis=1) if self._probs else None
        return Draft(mx.concatenate(tokens, axis=1), lengths, probs, chances=gauge.chances if gauge else ())


class Scores:
    """Draws the likeliest tokens, and keeps how likely all others are, for what may stand beside them."""

    def __init__(self, sampling: SamplingBatch, positions: mx.array, vocab: int, token_ids: mx.array | None = None):
        """As of `Draws`."""
        self._sampling, self._positions, self._vocab, self.token_ids = sampling, positions, vocab, token_ids
        self._levels: list[mx.array] = []

    def of(self, logits: mx.array, step: int) -> mx.array:
        """As `draft_scores`, of nodes [B, n, Vd] with so many draft tokens before them, which share their noise."""
        at = self._positions[:, None] + step
        return draft_scores(logits, self._sampling, at, self._vocab, self.token_ids)

    def __call__(self, logits: mx.array, step: int) -> mx.array:
        self._levels.append(self.of(logits, step))
        best = mx.argmax(self._levels[-1], axis=-1).astype(mx.int32)
        return best if self.token_ids is None else self.token_ids[best]

    @property
    def levels(self) -> mx.array:
        """[B, levels, Vd] float32, of all places of the chain."""
        return mx.concatenate(self._levels, axis=1)


class Gauge:
    """Reads, while a chain is drafted, how likely it is to stand by the proposer's own reckoning.

    That is the product of the chances of the likeliest tokens, whatever was drawn.
    """

    def __init__(self, enough: Enough, sampling: SamplingBatch):
        self._enough, self._sampling = enough, sampling
        self._doubts: list[mx.array] = []
        self.chances: list[list[float]] = []
        """What it was told of each row, every time that it was asked."""

    def add(self, logits: mx.array) -> mx.array:
        """Take the next token's logits [B, 1, Vd] into account: the doubts down to it, [B, 1], not computed yet."""
        doubt = doubt_of(logits, self._sampling)
        self._doubts.append(self._doubts[-1] + doubt if self._doubts else doubt)
        return self._doubts[-1]

    def stops(self) -> bool:
        """Whether the chain is to end with the tokens that it has."""
        known = len(self._doubts) - BEHIND
        if known <= 0:
            return False
        doubts = cast(list[list[float]], self._doubts[known - 1].tolist())
        self.chances.append([exp(-doubt) for (doubt,) in doubts])
        return self._enough(self.chances[-1])


def draw_chain(depth: int, forward: Forward, draw: Draw, gauge: Gauge | None = None) -> list[mx.array]:
    """The tokens of a chain, [B, 1] int32 each in the target's ids: `depth` of them, or fewer where the gauge stops.

    The device drafts while the host builds the next step.
    """
    tokens: list[mx.array] = []
    for step in range(depth):
        if gauge is not None and gauge.stops():
            break
        logits = forward(tokens[-1] if tokens else None)
        tokens.append(draw(logits, step))
        mx.async_eval(tokens[-1], *([] if gauge is None else [gauge.add(logits)]))
    return tokens


def flank(chain: list[mx.array], scores: Scores, gauge: Gauge, beside: Beside) -> tuple[mx.array, Tree | None]:
    """The tokens of a chain that has ended and of what `beside` wants beside it, and their tree, where that is any."""
    tokens = mx.concatenate(chain, axis=1)
    more = beside(tokens.shape[1], gauge.chances)
    return flanked(tokens, scores.levels, more, scores.token_ids) if more else (tokens, None)
