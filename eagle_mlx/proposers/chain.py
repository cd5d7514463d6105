"""A chain of draft tokens, drawn one after the other, and its early exit."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, isnan
from typing import cast

import mlx.core as mx

from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.sampling import SamplingBatch, draft_sample, draft_scores, surprise_of
from eagle_mlx.plan import CONFIDENCE_LAG

Forward = Callable[[mx.array | None], mx.array]
"""The chain's newest tokens [B, 1], None before the first -> logits [B, 1, Vd] of what follows."""
SampleFn = Callable[[mx.array, int], mx.array]
"""Logits [B, 1, Vd] and the token's place in the chain -> the token [B, 1] int32 in the target's ids."""


class ChainSampler:
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

    def draft(self, tokens: list[mx.array], lengths: mx.array, exits: EarlyExit | None = None) -> Draft:
        """What was drawn, as far as the chain goes."""
        probs = mx.concatenate(self._probs[: len(tokens)], axis=1) if self._probs else None
        return Draft(mx.concatenate(tokens, axis=1), lengths, probs, confidences=exits.confidences if exits else ())


class TreeScorer:
    """Takes the likeliest tokens, and keeps the scores of all others, for side branches."""

    def __init__(self, sampling: SamplingBatch, positions: mx.array, vocab: int, token_ids: mx.array | None = None):
        """As of `ChainSampler`."""
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


class EarlyExit:
    """Ends a chain early where it is unlikely to be accepted, by the proposer's own confidence.

    A token's confidence is the product of the probabilities of the likeliest tokens down to it, whatever was drawn.
    """

    def __init__(self, stop_below: float, sampling: SamplingBatch):
        self._stop_below, self._sampling = stop_below, sampling
        self._surprises: list[mx.array] = []
        """By token, the negative logarithm of its confidence, [B, 1]."""
        self.confidences: list[list[float]] = []
        """As in `Draft`."""

    def add(self, logits: mx.array) -> mx.array:
        """Take the next token's logits [B, 1, Vd] into account; returns what is to be computed for it, [B, 1]."""
        surprise = surprise_of(logits, self._sampling)
        self._surprises.append(self._surprises[-1] + surprise if self._surprises else surprise)
        return self._surprises[-1]

    @property
    def should_stop(self) -> bool:
        """Whether the chain is to end with the tokens that it has. Waits for the device, CONFIDENCE_LAG tokens back."""
        known = len(self._surprises) - CONFIDENCE_LAG
        if known <= 0:
            return False
        surprises = cast(list[list[float]], self._surprises[known - 1].tolist())
        self.confidences.append([0.0 if isnan(surprise) else exp(-surprise) for (surprise,) in surprises])
        return sum(self.confidences[-1]) < self._stop_below * len(surprises)


def draft_chain(depth: int, forward: Forward, draw: SampleFn, exits: EarlyExit | None = None) -> list[mx.array]:
    """The tokens of a chain, [B, 1] int32 each in the target's ids: `depth` of them, or fewer where it exits early.

    The device drafts while the host builds the next step.
    """
    tokens: list[mx.array] = []
    for step in range(depth):
        if exits is not None and exits.should_stop:
            break
        logits = forward(tokens[-1] if tokens else None)
        tokens.append(draw(logits, step))
        mx.async_eval(tokens[-1], *([] if exits is None else [exits.add(logits)]))
    return tokens
