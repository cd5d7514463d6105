"""Losses per draft step: cross-entropy, total variation or LK with the target's distribution, and feature distance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from eagle_mlx.cpu import log_sum_exp, softmax
from eagle_mlx.decoding.filters import largest
from eagle_mlx.formats.tensors import arrays_of
from eagle_mlx.target import Target

from ..kinds import Head
from ..unroll import holding


@dataclass(frozen=True)
class Objective:
    loss: str = "soft"  # the loss of tokens, one of `LOSSES`
    token_weight: float = 1.0
    variation_weight: float = 0.0  # weight of the distance |p - q| between the target's and the head's distribution
    confidence_weight: float = 0.0  # weight of the binary cross-entropy of the head's confidence
    selector_weight: float = 0.0  # weight of the cross-entropy of the selector among its candidates
    feature_weight: float = 0.0


CROSS_ENTROPY = Objective()


@dataclass(frozen=True)
class Labels:
    """The target's distribution at U positions."""

    probs: mx.array  # [U, Vd] float32, normalized over the draft vocabulary
    best: mx.array  # [U] int32: draft id of the target's most likely token; 0 if it has none
    inside: mx.array  # [U] float32: 1 if the target's most likely token is in the draft vocabulary, else 0


def soft_labels(target: Target, last: mx.array, token_ids: mx.array | None) -> Labels:
    """Return labels from the target's last hidden states [U, H], before its final norm.

    token_ids [Vd] int32: the target's id of each draft id, ascending; None if the vocabularies are equal. A position
    has no loss if its most likely token is not in the draft vocabulary, as in SafeAILab's code.
    """
    logits = target.logits(target.norm(last)).astype(mx.float32)
    best = mx.argmax(logits, axis=-1).astype(mx.int32)
    if token_ids is None:
        return Labels(softmax(logits), best, mx.ones(best.shape, mx.float32))
    to_draft = mx.full((target.vocab_size,), -1, mx.int32)
    to_draft[token_ids] = mx.arange(token_ids.shape[0], dtype=mx.int32)
    draft_best = to_draft[best]
    probs = softmax(mx.take(logits, token_ids, axis=-1))
    return Labels(probs, mx.maximum(draft_best, 0), (draft_best >= 0).astype(mx.float32))


def soft_cross_entropy(logits: mx.array, probs: mx.array) -> mx.array:
    """Return -sum(probs * log_softmax(logits)) over the last axis, [..., V] -> [...]. `probs` must sum to 1."""
    return log_sum_exp(logits)[..., 0] - mx.sum(probs * logits, axis=-1)


def hard_cross_entropy(logits: mx.array, best: mx.array) -> mx.array:
    """Return -log_softmax(logits) at the target's most likely tokens, [U, V] and [U] -> [U]."""
    return (log_sum_exp(logits) - mx.take_along_axis(logits, best[:, None], axis=-1))[..., 0]


def total_variation(logits: mx.array, probs: mx.array) -> mx.array:
    """Return sum |p - q| / 2 [U] of the target's p [U, V] and the head's q = softmax(logits).

    It is the probability that rejection sampling rejects a token of q (Leviathan et al. 2023, theorem 3.5).
    """
    return mx.sum(mx.abs(probs - softmax(logits)), axis=-1) / 2


def lk_loss(logits: mx.array, probs: mx.array) -> mx.array:
    """Return the hybrid LK loss [U]: s KL(p, q) + (1 - s) TV(p, q) with s = exp(-3 acceptance), without its gradient.

    A poor draft learns from the divergence, whose gradients are larger, and a good one from the acceptance. Source:
    Samarin et al. 2026, arXiv 2602.23881, sections 4.2 and 4.4, who find 3 to be the best; per position as in
    vllm-project/speculators, `lk_hybrid_loss`. The cross-entropy stands for the divergence: their gradients are equal.
    """
    rejected = total_variation(logits, probs)
    share = mx.stop_gradient(mx.exp(-3 * (1 - rejected)))
    return share * soft_cross_entropy(logits, probs) + (1 - share) * rejected


LOSSES: dict[str, Callable[[mx.array, Labels], mx.array]] = {
    "soft": lambda logits, labels: soft_cross_entropy(logits, labels.probs),
    "hard": lambda logits, labels: hard_cross_entropy(logits, labels.best),
    "tv": lambda logits, labels: total_variation(logits, labels.probs),
    "lk": lambda logits, labels: lk_loss(logits, labels.probs),
}
"""Losses of tokens by the value of `--loss`, [U, Vd] -> [U]."""


def confidence_loss(logits: mx.array, acceptance: mx.array) -> mx.array:
    """Return the binary cross-entropy [U] of confidence logits [U] with the probability of acceptance [U]."""
    return mx.logaddexp(logits, 0.0) - mx.stop_gradient(acceptance) * logits


def selector_loss(scores: mx.array, is_label: mx.array) -> mx.array:
    """Return the cross-entropy [U] of candidates with scores [U, K]; 0 if none of them `is_label`, [U, K] bool."""
    losses = log_sum_exp(scores)[..., 0] - mx.sum(is_label * scores, axis=-1)
    return mx.any(is_label, axis=-1) * losses


def step_loss(
    head: Head, x: mx.array, labels: Labels, weights: mx.array, objective: Objective = CROSS_ENTROPY
) -> tuple[mx.array, mx.array]:
    """Return a draft step's weighted loss and hits, scalars, for x [U, H] or as `with_latents` and weights [U].

    A selector chooses among the largest logits of a slot.
    """
    size = head.hidden_size
    h, latent, before = x, None, None
    if "markov_head" in head:
        h, latent, before = mx.split(x, [size, (size + x.shape[-1]) // 2], axis=-1)
    elif "candidate_selector" in head:
        h, latent = mx.split(x, [size], axis=-1)
    logits = head.logits(h)
    if before is not None:
        logits = logits + head.markov_head.markov_w2(latent)
    logits = logits.astype(mx.float32)
    losses = objective.token_weight * LOSSES[objective.loss](logits, labels)
    if objective.variation_weight or objective.confidence_weight:
        rejected = total_variation(logits, labels.probs)
        losses = losses + objective.variation_weight * 2 * rejected
        if objective.confidence_weight and head.config.confidence_head:
            sure = head.confidence_head(h, before if head.config.confidence_with_markov else None)
            losses = losses + objective.confidence_weight * confidence_loss(sure, 1 - rejected)
    best = labels.best[:, None]
    if "candidate_selector" in head:
        candidates = largest(mx.stop_gradient(logits), head.config.selector_top_k)[1]
        scores, is_label = head.candidate_selector.scores(latent, logits, candidates), candidates == best
        losses = losses + objective.selector_weight * selector_loss(scores, is_label)
        chosen = mx.max(mx.where(is_label, scores, -mx.inf), axis=-1, keepdims=True)
    else:
        scores, chosen = logits, mx.take_along_axis(logits, best, axis=-1)
    loss = mx.sum(weights * labels.inside * losses)
    is_top = mx.stop_gradient(chosen >= mx.max(scores, axis=-1, keepdims=True))[:, 0]
    return loss, mx.sum(weights * labels.inside * is_top)


def feature_losses(outputs: list[mx.array], wanted: mx.array, select: mx.array, weights: mx.array) -> mx.array:
    """Return the weighted smooth L1 distance [S] between the draft steps' outputs and the target's features.

    wanted [U, H]: the target's features. Source: SafeAILab/EAGLE, eagle/train/main.py: the mean over a feature, summed
    over positions with loss.
    """
    losses = []
    for step, h in enumerate(outputs):
        off = mx.abs(h.reshape(-1, h.shape[-1])[select[step]].astype(mx.float32) - wanted)
        distance = mx.where(off < 1, 0.5 * mx.square(off), off - 0.5)
        losses.append(mx.sum(weights[step] * mx.mean(distance, axis=-1)))
    return mx.stack(losses)


_IN_LOSS = (
    *("norm.", "lm_head.", "markov_head.markov_w2.", "confidence_head."),
    "candidate_selector.successor_codebook.",
)
"""Weights that `step_loss` reads, by how their names begin."""


@dataclass(frozen=True)
class ChunkedLoss:
    """The weighted loss of all draft steps at U labels, without the feature distance, computed in chunks.

    No logits are kept for the backward pass. The gradients of each chunk are computed with its loss, and the backward
    pass only scales them. Nothing is computed twice.
    """

    head: Head
    target: Target
    last: mx.array  # [U, H]: the target's last hidden states before its final norm
    weights: mx.array  # [S, U] float32: weight of each label in each draft step
    objective: Objective = CROSS_ENTROPY
    logits: int = 1 << 25  # target logits in memory at once

    def __call__(self, outputs: list[mx.array], select: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return the loss, the steps' weighted losses [S] and their hits [S].

        outputs: S times [B, P, H], as from `unroll`; select [S, U] int32: the index among B * P outputs for each label.
        Hits are the weighted share of labels for which head and target have the same most likely token.
        """
        read_here = {n: w for n, w in arrays_of(self.head.trainable_parameters()).items() if n.startswith(_IN_LOSS)}
        names, own = list(read_here), list(read_here.values())
        read = [h.reshape(-1, h.shape[-1])[select[step]] for step, h in enumerate(outputs)]

        def loss_and_gradients(*given: mx.array) -> list[mx.array]:
            return self._loss_and_gradients(names, given[: len(names)], given[len(names) :])

        forward: Any = mx.custom_function(loss_and_gradients)

        @forward.vjp  # type: ignore[untyped-decorator]  # MLX's
        def backward(_: Any, cotangents: Sequence[mx.array], results: Sequence[mx.array]) -> list[mx.array]:
            return [(cotangents[0] * gradient).astype(gradient.dtype) for gradient in results[3:]]

        loss, by_step, hits, *_ = forward(*own, *read)
        return loss, mx.stop_gradient(by_step), mx.stop_gradient(hits)

    def _loss_and_gradients(
        self, names: Sequence[str], own: Sequence[mx.array], read: Sequence[mx.array]
    ) -> list[mx.array]:
        """Return loss, the steps' losses and hits, then the gradients of `own` and of `read`, computed in chunks."""
        losses = [mx.array(0.0)] * len(read)
        hits = list(losses)
        of_own = [mx.zeros(weight.shape) for weight in own]  # float32 for any dtype of weights
        of_read: list[list[mx.array]] = [[] for _ in read]
        done: list[mx.array] = []  # dependencies of the next chunk, so that MLX does not compute several chunks at once
        size = max(1, self.logits // self.target.vocab_size)
        for begin in range(0, self.last.shape[0], size):
            at = slice(begin, begin + size)
            labels = soft_labels(self.target, _after(self.last[at], done), self.head.token_ids)
            for step, x in enumerate(read):
                of_chunk = partial(self._loss_of, names, labels, step, at)
                (loss, hit), (gradients, gradient_of_x) = mx.value_and_grad(of_chunk, argnums=(0, 1))(
                    list(own), _after(x[at], done)
                )
                losses[step] = losses[step] + loss
                hits[step] = hits[step] + hit
                of_own = [total + gradient for total, gradient in zip(of_own, gradients, strict=True)]
                of_read[step].append(gradient_of_x)
                done = [gradient_of_x, *of_own, losses[step], hits[step]]
        by_step = mx.stack(losses)
        return [mx.sum(by_step), by_step, mx.stack(hits), *of_own, *map(mx.concatenate, of_read)]

    def _loss_of(
        self, names: Sequence[str], labels: Labels, step: int, at: slice, own: list[mx.array], x: mx.array
    ) -> tuple[mx.array, mx.array]:
        with holding(self.head, names, own):
            return step_loss(self.head, x, labels, self.weights[step, at], self.objective)


def _after(x: mx.array, done: list[mx.array]) -> mx.array:
    return mx.depends([x], done)[0] if done else x
