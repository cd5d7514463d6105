"""Draft steps unrolled over whole rows, each fed the head's own output of the step before, for heads of any make.

Each layer is given the cache that drafting would have.

`eagle3.py` does the same for the usual EAGLE-3 head, at less cost; this one knows nothing of what is inside a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from .eagle3 import take_rows
from .recompute import Relay, Step, recomputed

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

    The same as `unroll` in `eagle3.py`, argument by argument, but what comes out is what the head itself returns: the
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
