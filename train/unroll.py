"""Unrolled draft steps for training any head: each reads the head's output of the one before, with drafting's caches.

Optionally, a step's intermediate values are recomputed in the backward pass, which saves memory but takes time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from eagle_mlx.formats.tensors import arrays_of

Step = Callable[..., list[mx.array]]
NOT_IN_A_STEP = ("fc_norm", "input_norm", "lm_head", "embed_tokens")
"""Parts of heads that are never used in a draft step."""
HIDDEN = -1e9
"""Added to the scores of masked keys."""


class Inputs(NamedTuple):
    """The input of the draft steps of B rows, at P indices each."""

    embeddings: mx.array  # [B, L, Ht] of the tokens 0..L-1
    features: mx.array  # [B, L, H]
    segments: mx.array  # [B, L] int32
    positions: mx.array  # [B, P] int32: for block drafters the anchors, which are the blocks' newest tokens


class UnrolledCache:
    """One layer's keys and values for drafts at all positions at once, with mlx-lm's cache protocol.

    Step 0 adds L entries computed from the target's hidden states. Each later step adds L entries of its drafts, of
    which the query at index t attends only to the t-th. Index t of step j has position t + j.
    """

    def __init__(
        self, segments: mx.array, past: Sequence[tuple[mx.array, mx.array]] = (), draft_window: int | None = None
    ):
        """segments [B, L] int32: indices do not attend to other segments. past: keys and values of earlier steps.
        draft_window: the number of entries of step 0 that each index attends to in every step; None for all."""
        self.offset = len(past)
        """The current step, which is also the offset from indices to positions."""
        self._segments, self._draft_window = segments, draft_window
        self._keys = [keys for keys, _ in past]
        self._values = [values for _, values in past]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add a step's keys and values [B, heads, L, D]. Return those of all steps [B, heads, (step + 1) * L, D]."""
        self._keys.append(keys)
        self._values.append(values)
        if len(self._keys) == 1:
            return keys, values
        return mx.concatenate(self._keys, axis=2), mx.concatenate(self._values, axis=2)

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return the mask over the keys of all steps, within a window of positions: bool [B, 1, L, (step + 1) * L]."""
        at = mx.arange(count)
        back = at[:, None] - at + self.offset  # positions from the query back to the keys of step 0
        seen = (back >= self.offset) & (self._segments[:, :, None] == self._segments[:, None])
        if window_size is not None:
            seen = seen & (back < window_size)
        if self._draft_window is not None:
            seen = seen & (back - self.offset < self._draft_window)
        blocks = [seen]
        for step in range(1, self.offset + 1):
            inside = window_size is None or self.offset - step < window_size
            own = mx.eye(count, dtype=mx.bool_) if inside else mx.zeros((count, count), mx.bool_)
            blocks.append(mx.broadcast_to(own, seen.shape))
        return mx.concatenate(blocks, axis=-1)[:, None]

    @property
    def latest(self) -> tuple[mx.array, mx.array]:
        return self._keys[-1], self._values[-1]


def unroll_feedback(head: Any, inputs: Inputs, steps: int, recompute: bool = False) -> list[mx.array]:
    """Return a head's output at the given positions for each draft step: `steps` times [B, P, H].

    The draft steps and `recompute` are as in `kinds/eagle3.py`. The outputs are the head's own, used as the next
    step's feature and by `head.logits`. Every step computes all L positions.
    """
    embeddings, features, segments, positions = inputs
    layers = head.cache_layers

    def draft(step: int, h: mx.array, *past: mx.array) -> list[mx.array]:
        """Return the output, then each layer's keys and values. `past` has the keys and values of earlier steps."""
        pairs = list(zip(past[::2], past[1::2], strict=True))
        caches = [UnrolledCache(segments, pairs[layer::layers], head.draft_window) for layer in range(layers)]
        padding = mx.repeat(embeddings[:, -1:], step + 1, axis=1)
        following = mx.concatenate([embeddings[:, step + 1 :], padding], axis=1)[:, : embeddings.shape[1]]
        h = head(following, h, caches)
        return [h, *(array for cache in caches for array in cache.latest)]

    outputs = run_steps(head, draft, [features], steps, recompute, NOT_IN_A_STEP)
    return [take_rows(h, positions) for h in outputs]


def run_steps(
    module: nn.Module, draft: Step, read: list[mx.array], steps: int, recompute: bool, without: Collection[str]
) -> list[mx.array]:
    """Return the output of each draft step. The module's weights are passed from step to step, as in `handed_on`.

    `draft(number, *read)` returns the step's output, which replaces the first array for the next step, and arrays that
    later steps read too. `without` names the module's parts that no step uses.
    """
    names, weights = weights_but(module, without)
    outputs = []
    for number in range(steps):
        step: Step = partial(draft, number)
        step = recomputed(module, step, without) if recompute else step
        with holding(module, names, weights):
            output, *made = step(*read)
        outputs.append(output)
        handed = handed_on(len(names), [*weights, output, *read[1:], *made])
        weights, read = handed[: len(names)], handed[len(names) :]
    return outputs


def take_rows(x: mx.array, positions: mx.array) -> mx.array:
    """Return x [B, L, H] at positions [B, P] as [B, P, H]."""
    b, length, width = x.shape
    flat = positions + mx.arange(b)[:, None] * length
    return x.reshape(b * length, width)[flat]


def recomputed(module: nn.Module, step: Step, without: Collection[str] = ()) -> Step:
    """Return `step` with the same outputs and gradients that only keeps inputs and outputs for the backward pass.

    Gradients reach the arguments and the module's trainable weights, except in the parts `without`. The step is
    recomputed only when the gradients of its outputs are ready; `mx.checkpoint` may recompute several at a time.
    """

    def call(*arrays: mx.array) -> list[mx.array]:
        names, weights = weights_but(module, without)
        count = len(names)

        def pure(*given: mx.array) -> list[mx.array]:
            with holding(module, names, given[:count]):
                return step(*given[count:])

        forward: Any = mx.custom_function(pure)

        @forward.vjp  # type: ignore[untyped-decorator]  # MLX's
        def backward(primals: Sequence[mx.array], cotangents: Sequence[mx.array], _: Any) -> list[mx.array]:
            return mx.vjp(pure, mx.depends(list(primals), list(cotangents)), list(cotangents))[1]

        return list(forward(*weights, *arrays))

    return call


def weights_but(module: nn.Module, without: Collection[str] = ()) -> tuple[list[str], list[mx.array]]:
    """Return names and values of the module's trainable weights, except in the parts `without`."""
    parts = {name: part for name, part in module.trainable_parameters().items() if name not in without}
    leaves = arrays_of(parts)
    return list(leaves), list(leaves.values())


@contextlib.contextmanager
def holding(module: nn.Module, names: Sequence[str], values: Sequence[mx.array]) -> Iterator[None]:
    before = arrays_of(module.trainable_parameters())
    module.update(tree_unflatten(list(zip(names, values, strict=True))))
    try:
        yield
    finally:
        module.update(tree_unflatten([(name, before[name]) for name in names]))


def handed_on(count: int, arrays: list[mx.array]) -> list[mx.array]:
    """Return the same arrays; their gradients wait for one another, the first `count` in float32.

    So the sum over steps does not lose precision.
    """
    forward: Any = mx.custom_function(lambda *given: list(given))

    @forward.vjp  # type: ignore[untyped-decorator]  # MLX's
    def backward(_: Any, cotangents: Sequence[mx.array], __: Any) -> list[mx.array]:
        gradients = [c.astype(mx.float32) if at < count else c for at, c in enumerate(cotangents)]
        return list(mx.depends(gradients, gradients))

    return list(forward(*arrays))
