"""Draft steps unrolled in training, for heads of any make: each is fed the head's own output of the step before.

Each layer is given the cache that drafting would have. What a step computes may be forgotten, and computed again when
its gradient is due: memory for time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

Step = Callable[..., list[mx.array]]
"""Arrays in, arrays out."""
NOT_IN_A_STEP = ("fc_norm", "input_norm", "lm_head", "embed_tokens")
"""Parts that no head uses in a draft step."""


class UnrolledCache:
    """One layer's keys and values while drafts run behind every position at once, in mlx-lm's cache protocol.

    First come the L entries of step 0, made of the target's hidden states; then, step by step, L entries that the
    drafts have made, of which the query at index t sees the t-th alone. Index t of step j stands at position t + j.
    """

    def __init__(self, segments: mx.array, past: Sequence[tuple[mx.array, mx.array]] = ()):
        """segments [B, L] int32: what lies in one segment sees nothing of another; the steps before are in `past`."""
        self.offset = len(past)
        """The step that is computed, which is how far its positions are from the indices."""
        self._segments = segments
        self._keys = [keys for keys, _ in past]
        self._values = [values for _, values in past]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add a step's [B, heads, L, D]; returns all steps', [B, heads, (step + 1) * L, D]."""
        self._keys.append(keys)
        self._values.append(values)
        if len(self._keys) == 1:
            return keys, values
        return mx.concatenate(self._keys, axis=2), mx.concatenate(self._values, axis=2)

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Which of all steps' keys each index sees, bool [B, 1, L, (step + 1) * L]; always an array.

        In a window only positions t + step - window_size + 1 .. t + step are seen.
        """
        at = mx.arange(count)
        back = at[:, None] - at + self.offset  # positions from the query back to the keys of step 0
        seen = (back >= self.offset) & (self._segments[:, :, None] == self._segments[:, None])
        if window_size is not None:
            seen = seen & (back < window_size)
        blocks = [seen]
        for step in range(1, self.offset + 1):
            inside = window_size is None or self.offset - step < window_size
            own = mx.eye(count, dtype=mx.bool_) if inside else mx.zeros((count, count), mx.bool_)
            blocks.append(mx.broadcast_to(own, seen.shape))
        return mx.concatenate(blocks, axis=-1)[:, None]

    @property
    def latest(self) -> tuple[mx.array, mx.array]:
        """Keys and values of the newest step."""
        return self._keys[-1], self._values[-1]


def unroll_feedback(
    head: Any,
    embeddings: mx.array,
    g: mx.array,
    segments: mx.array,
    positions: mx.array,
    steps: int,
    recompute: bool = False,
) -> list[mx.array]:
    """A head's output at the given positions for each draft step: `steps` times [B, P, H].

    The same as `kinds/eagle3/unroll.py`, argument by argument, but what comes out is what the head itself returns: the
    next step's feature and what `head.logits` reads. All L positions are computed in every step.
    """
    layers = head.cache_layers

    def draft(step: int, h: mx.array, *past: mx.array) -> list[mx.array]:
        """The output, then keys and values layer by layer; `past` has the latter of each step before."""
        pairs = list(zip(past[::2], past[1::2], strict=True))
        caches = [UnrolledCache(segments, pairs[layer::layers]) for layer in range(layers)]
        behind = mx.repeat(embeddings[:, -1:], step + 1, axis=1)
        following = mx.concatenate([embeddings[:, step + 1 :], behind], axis=1)[:, : embeddings.shape[1]]
        h = head(following, h, caches)
        return [h, *(array for cache in caches for array in cache.latest)]

    relay = Relay(head, NOT_IN_A_STEP)
    read, outputs = [g], []
    for number in range(steps):
        step: Step = partial(draft, number)
        step = recomputed(head, step, NOT_IN_A_STEP) if recompute else step
        with relay.holding():
            h, *made = step(*read)
        outputs.append(take_rows(h, positions))
        read = relay.hand_on(h, *read[1:], *made)
    return outputs


def take_rows(x: mx.array, positions: mx.array) -> mx.array:
    """x [B, L, H] at positions [B, P] -> [B, P, H]."""
    b, length, width = x.shape
    flat = positions + mx.arange(b)[:, None] * length
    return x.reshape(b * length, width)[flat]


def recomputed(module: nn.Module, step: Step, without: Collection[str] = ()) -> Step:
    """`step` with the same outputs and gradients, of which only inputs and outputs are kept for the backward pass.

    Gradients reach the arguments and the module's trainable weights, but for those of the parts named in `without`;
    whatever else the step uses counts as constant. It is computed again only once the gradient of its outputs is
    there: `mx.checkpoint` leaves that open, and MLX then computes several steps again at once.
    """

    def call(*arrays: mx.array) -> list[mx.array]:
        names, weights = weights_but(module, without)
        count = len(names)

        def pure(*given: mx.array) -> list[mx.array]:
            with holding(module, names, given[:count]):
                return step(*given[count:])

        forward: Any = mx.custom_function(pure)

        @forward.vjp  # type: ignore[untyped-decorator]
        def backward(primals: Sequence[mx.array], cotangents: Sequence[mx.array], _: Any) -> list[mx.array]:
            return mx.vjp(pure, mx.depends(list(primals), list(cotangents)), list(cotangents))[1]

        return list(forward(*weights, *arrays))

    return call


def weights_but(module: nn.Module, without: Collection[str] = ()) -> tuple[list[str], list[mx.array]]:
    """Names and values of the module's trainable weights outside its parts `without`."""
    parts = {name: part for name, part in module.trainable_parameters().items() if name not in without}
    leaves = cast(list[tuple[str, mx.array]], tree_flatten(parts))
    return [name for name, _ in leaves], [value for _, value in leaves]


@contextlib.contextmanager
def holding(module: nn.Module, names: Sequence[str], values: Sequence[mx.array]) -> Iterator[None]:
    """The module with other values for the weights of these names, within the block."""
    before = dict(cast(list[tuple[str, mx.array]], tree_flatten(module.trainable_parameters())))
    module.update(tree_unflatten(list(zip(names, values, strict=True))))
    try:
        yield
    finally:
        module.update(tree_unflatten([(name, before[name]) for name in names]))


class Relay:
    """A module's weights on their way from draft step to draft step."""

    def __init__(self, module: nn.Module, without: Collection[str] = ()):
        """The trainable weights, but for those of the parts named in `without`."""
        self._module = module
        self._names, self._weights = weights_but(module, without)

    def hand_on(self, *arrays: mx.array) -> list[mx.array]:
        """What the next draft step reads of the steps before it, floating numbers, as it is to read it."""
        count = len(self._names)
        handed = handed_on(count, [*self._weights, *arrays])
        self._weights = handed[:count]
        return handed[count:]

    def holding(self) -> contextlib.AbstractContextManager[None]:
        """The module with the weights as they were handed on last, within the block."""
        return holding(self._module, self._names, self._weights)


def handed_on(count: int, arrays: list[mx.array]) -> list[mx.array]:
    """The same arrays. In the backward pass none of their gradients is read before all of them are there.

    Gradients of the first `count` go on in float32, so that the sum over the steps is exact whatever the weights are.
    """
    forward: Any = mx.custom_function(lambda *given: list(given))

    @forward.vjp  # type: ignore[untyped-decorator]
    def backward(_: Any, cotangents: Sequence[mx.array], __: Any) -> list[mx.array]:
        found = [c.astype(mx.float32) if at < count else c for at, c in enumerate(cotangents)]
        return list(mx.depends(found, found))

    return list(forward(*arrays))
