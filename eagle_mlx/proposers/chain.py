"""Draft a chain of tokens one by one, with early exit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import exp, isnan
from typing import cast

import mlx.core as mx

from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.sampling import SamplingBatch, draft_sample, draft_scores, surprise_of
from eagle_mlx.plan import CONFIDENCE_LAG

Forward = Callable[[mx.array | None], mx.array]
"""Takes the newest tokens [B, 1], None before the first; returns logits [B, 1, Vd] for the next token."""


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
        self._sampling, self._positions, self._vocab, self.token_ids = sampling, positions, vocab, token_ids
        self._stop_below = stop_below
        self._surprises: list[mx.array] = []
        """For each token, the negative logarithm of its confidence, [B, 1]; empty without `stop_below`."""
        self.confidences: list[list[float]] = []
        """As in `Draft`."""
        self._kept: list[mx.array] = []
        """For each token, the distributions or scores that a subclass keeps, [B, 1, V]."""

    @abstractmethod
    def __call__(self, logits: mx.array, step: int | mx.array) -> mx.array:
        """Take logits [B, n, Vd] and their positions in the chain, an int or [n]; return target ids [B, n] int32."""

    def changed(self, logits: mx.array, drafted: list[mx.array]) -> mx.array:
        """Return logits [B, 1, Vd] after these draft tokens with the requests' penalties and biases."""
        changes = self._sampling.changes
        return logits if changes is None else changes(logits, drafted, self.token_ids)

    def chain(self, depth: int, forward: Forward) -> list[mx.array]:
        """Draw up to `depth` tokens, [B, 1] int32 each. The device drafts while the host builds the next step."""
        tokens: list[mx.array] = []
        while len(tokens) < depth and not self._should_stop():
            logits = self.changed(forward(tokens[-1] if tokens else None), tokens)
            tokens.append(self(logits, len(tokens)))
            if self._stop_below is not None:
                surprise = surprise_of(logits, self._sampling)
                self._surprises.append(self._surprises[-1] + surprise if self._surprises else surprise)
            mx.async_eval(tokens[-1], *self._surprises[-1:])
        return tokens

    def _should_stop(self) -> bool:
        """Wait for the confidence of the token CONFIDENCE_LAG steps back."""
        known = len(self._surprises) - CONFIDENCE_LAG
        if known <= 0 or self._stop_below is None:
            return False
        surprises = cast(list[list[float]], self._surprises[known - 1].tolist())
        self.confidences.append([0.0 if isnan(surprise) else exp(-surprise) for (surprise,) in surprises])
        return sum(self.confidences[-1]) < self._stop_below * len(surprises)


class ChainSampler(Draws):
    """Samples tokens with each row's parameters, and keeps the distributions that rejection sampling needs."""

    def __call__(self, logits: mx.array, step: int | mx.array) -> mx.array:
        at = self._positions[:, None]
        if not self._sampling.all_greedy:  # greedy rows draw no noise
            at = at + step
        token, q = draft_sample(logits, self._sampling, at, self._vocab, self.token_ids)
        self._kept += [] if q is None else [q]
        return token

    def draft(self, tokens: list[mx.array], lengths: mx.array) -> Draft:
        probs = mx.concatenate(self._kept[: len(tokens)], axis=1) if self._kept else None
        return Draft(mx.concatenate(tokens, axis=1), lengths, probs, confidences=self.confidences)


class TreeScorer(Draws):
    """Selects the most likely tokens, and keeps all scores for side branches."""

    def of(self, logits: mx.array, step: int | mx.array) -> mx.array:
        """Return `draft_scores` of nodes [B, n, Vd] at depth `step`, which share their noise."""
        at = self._positions[:, None] + step
        return draft_scores(logits, self._sampling, at, self._vocab, self.token_ids)

    def __call__(self, logits: mx.array, step: int | mx.array) -> mx.array:
        self._kept.append(self.of(logits, step))
        best = mx.argmax(self._kept[-1], axis=-1).astype(mx.int32)
        return best if self.token_ids is None else self.token_ids[best]

    @property
    def levels(self) -> mx.array:
        """Scores [B, levels, Vd] float32 at all chain positions."""
        return mx.concatenate(self._kept, axis=1)
