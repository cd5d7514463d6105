"""The losses, step by step: cross-entropy with the target's distribution or its best token, distance of features."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from eagle_mlx.cpu import fastmath
from eagle_mlx.target import Target

from ..kinds import Head

IN_LOGITS = ("norm", "lm_head")
"""Parts that a head uses to make logits."""


@dataclass(frozen=True)
class Objective:
    """What is made small."""

    hard: bool = False
    """Cross-entropy with the target's most likely token in place of its whole distribution."""
    token_weight: float = 1.0
    """What the cross-entropy counts for."""
    feature_weight: float = 0.0
    """What the distance of the features counts for."""


CROSS_ENTROPY = Objective()


@dataclass(frozen=True)
class Labels:
    """The target's distribution at U positions."""

    probs: mx.array
    """[U, Vd] float32, normalised over the draft vocabulary."""
    best: mx.array
    """[U] int32, the draft id of the target's most likely token; 0 where it has none."""
    inside: mx.array
    """[U] float32, 1 where the target's most likely token is in the draft vocabulary, else 0."""


def step_weights(steps: int, decay: float) -> list[float]:
    """What each draft step's mean loss counts for: decay**j, normalised."""
    weights = [decay**j for j in range(steps)]
    return [weight / sum(weights) for weight in weights]


def soft_labels(target: Target, last: mx.array, token_ids: mx.array | None) -> Labels:
    """Labels from the target's last hidden states [U, H], before its final norm.

    token_ids [Vd] int32: the target's id of each draft id, ascending; None where the vocabularies are equal. Positions
    whose most likely token cannot be drafted carry no loss, as in SafeAILab's code.
    """
    logits = target.lm_head(target.norm(last)).astype(mx.float32)
    best = mx.argmax(logits, axis=-1).astype(mx.int32)
    if token_ids is None:
        return Labels(fastmath.softmax(logits), best, mx.ones(best.shape, mx.float32))
    to_draft = mx.full((target.vocab_size,), -1, mx.int32)
    to_draft[token_ids] = mx.arange(token_ids.shape[0], dtype=mx.int32)
    draft_best = to_draft[best]
    probs = fastmath.softmax(mx.take(logits, token_ids, axis=-1))
    return Labels(probs, mx.maximum(draft_best, 0), (draft_best >= 0).astype(mx.float32))


def soft_cross_entropy(logits: mx.array, probs: mx.array) -> mx.array:
    """-sum(probs * log_softmax(logits)) over the last axis, which `probs` sums to 1: [..., V] -> [...]."""
    return fastmath.log_sum_exp(logits)[..., 0] - mx.sum(probs * logits, axis=-1)


def cross_entropy(logits: mx.array, labels: Labels, hard: bool) -> mx.array:
    """[U, Vd] -> [U], soft or hard."""
    if not hard:
        return soft_cross_entropy(logits, labels.probs)
    chosen = mx.take_along_axis(logits, labels.best[:, None], axis=-1)
    return (fastmath.log_sum_exp(logits) - chosen)[..., 0]


def step_loss(
    head: Head, x: mx.array, labels: Labels, weights: mx.array, hard: bool = False
) -> tuple[mx.array, mx.array]:
    """One draft step's weighted cross-entropy and share of hits, both scalars: x [U, H], weights [U] float32."""
    logits = head.logits(x).astype(mx.float32)
    loss = mx.sum(weights * labels.inside * cross_entropy(logits, labels, hard))
    logits = mx.stop_gradient(logits)
    chosen = mx.take_along_axis(logits, labels.best[:, None], axis=-1)
    is_top = (chosen >= mx.max(logits, axis=-1, keepdims=True))[:, 0]
    return loss, mx.sum(weights * labels.inside * is_top)


def feature_losses(outputs: list[mx.array], wanted: mx.array, select: mx.array, weights: mx.array) -> mx.array:
    """The weighted smooth L1 distance [S] of the draft steps' outputs from the target's features, wanted [U, H].

    Source: SafeAILab/EAGLE, eagle/train/main.py: the mean over a feature, summed over the positions with loss.
    """
    losses = []
    for step, h in enumerate(outputs):
        off = mx.abs(h.reshape(-1, h.shape[-1])[select[step]].astype(mx.float32) - wanted)
        distance = mx.where(off < 1, 0.5 * mx.square(off), off - 0.5)
        losses.append(mx.sum(weights[step] * mx.mean(distance, axis=-1)))
    return mx.stack(losses)
