"""The loss of all draft steps, chunk by chunk, so that no logits are kept for the backward pass.

The gradients of a chunk of labels are computed with its loss, and only their sums are kept. The backward pass scales
them. Nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from eagle_mlx.target import Target

from ..kinds import Head
from ..unroll import holding, weights_but
from .losses import IN_LOGITS, Labels, soft_labels, step_loss

_LOGITS = 1 << 25
"""Logits of the target that are in memory at once."""


@dataclass(frozen=True)
class ChunkedLoss:
    """The weighted cross-entropy of all draft steps at U labels, and what came of each step."""

    head: Head
    target: Target
    last: mx.array
    """[U, H], before the target's final norm."""
    weights: mx.array
    """[S, U] float32: what each label counts for in each draft step, 0 for nothing."""
    hard: bool = False
    logits: int = _LOGITS
    """How many logits are in memory at once."""

    def __call__(self, outputs: list[mx.array], select: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """The loss, the steps' weighted losses [S] and their hits [S].

        outputs: S times [B, P, H], as from `unroll`; select [S, U] int32: which of the B * P outputs answers for each
        label. Hits are the weighted share of labels where head and target have the same most likely token.
        """
        others = [name for name in self.head.trainable_parameters() if name not in IN_LOGITS]
        names, own = weights_but(self.head, others)
        read = [h.reshape(-1, h.shape[-1])[select[step]] for step, h in enumerate(outputs)]

        def loss_and_gradients(*given: mx.array) -> list[mx.array]:
            return self._loss_and_gradients(names, given[: len(names)], given[len(names) :])

        forward: Any = mx.custom_function(loss_and_gradients)

        @forward.vjp  # type: ignore[untyped-decorator]
        def backward(_: Any, cotangents: Sequence[mx.array], found: Sequence[mx.array]) -> list[mx.array]:
            return [(cotangents[0] * gradient).astype(gradient.dtype) for gradient in found[3:]]

        loss, by_step, hits, *_ = forward(*own, *read)
        return loss, mx.stop_gradient(by_step), mx.stop_gradient(hits)

    def _loss_and_gradients(
        self, names: Sequence[str], own: Sequence[mx.array], read: Sequence[mx.array]
    ) -> list[mx.array]:
        """Loss, the steps' losses and hits, then the gradients of `own` and of `read`, chunk after chunk."""
        losses = [mx.array(0.0)] * len(read)
        hits = list(losses)
        of_own = [mx.zeros(weight.shape) for weight in own]  # float32, whatever the weights are
        of_read: list[list[mx.array]] = [[] for _ in read]
        done: list[mx.array] = []
        """What the next chunk waits for, so that MLX does not compute several at once."""
        size = max(1, self.logits // self.target.vocab_size)
        for begin in range(0, self.last.shape[0], size):
            at = slice(begin, begin + size)
            labels = soft_labels(self.target, _after(self.last[at], done), self.head.token_ids)
            for step, x in enumerate(read):
                loss, hit, gradients, gradient_of_x = self._chunk(names, own, _after(x[at], done), labels, step, at)
                losses[step] = losses[step] + loss
                hits[step] = hits[step] + hit
                of_own = [total + gradient for total, gradient in zip(of_own, gradients, strict=True)]
                of_read[step].append(gradient_of_x)
                done = [gradient_of_x, *of_own, losses[step], hits[step]]
        by_step = mx.stack(losses)
        return [mx.sum(by_step), by_step, mx.stack(hits), *of_own, *map(mx.concatenate, of_read)]

    def _chunk(
        self, names: Sequence[str], own: Sequence[mx.array], x: mx.array, labels: Labels, step: int, at: slice
    ) -> tuple[mx.array, mx.array, list[mx.array], mx.array]:
        """A draft step's loss and hits at some labels, with the gradients of the weights and of x."""

        def loss_of(weights: list[mx.array], x: mx.array) -> tuple[mx.array, mx.array]:
            with holding(self.head, names, weights):
                return step_loss(self.head, x, labels, self.weights[step, at], self.hard)

        (loss, hit), (gradients, gradient_of_x) = mx.value_and_grad(loss_of, argnums=(0, 1))(list(own), x)
        return loss, hit, gradients, gradient_of_x


def _after(x: mx.array, done: list[mx.array]) -> mx.array:
    return mx.depends([x], done)[0] if done else x
