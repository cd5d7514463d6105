"""Training-time test: draft steps unrolled over a whole batch, each with the previous step's output as input.

Source: Li et al. 2025, EAGLE-3, section 3.2 and figure 6; SafeAILab/EAGLE and sgl-project/SpecForge.
"""

from __future__ import annotations

import mlx.core as mx

from eagle_mlx.cpu import fastmath
from eagle_mlx.heads.eagle3 import Eagle3Head
from eagle_mlx.heads.layers import Attention

from ...unroll import HIDDEN, Inputs, run_steps, take_rows, unroll_feedback

NOT_IN_A_STEP = ("fc", "fc_norm", "input_norm", "lm_head", "embed_tokens")
"""Parts of the head that a draft step does not use."""


def unroll(head: Eagle3Head, inputs: Inputs, steps: int, recompute: bool = False) -> list[mx.array]:
    """Return the head's output at the given positions for each draft step: `steps` times [B, P, H].

    Step j at index t reads the embedding of token t+1+j and the output of step j-1 at t (the feature for j = 0), with
    rotary position t+j. It attends to the keys of step 0 at indices t' <= t of the same segment, and to those of steps
    1..j at t itself. This is the cache that a row would have after drafting j tokens from index t.

    With `recompute`, only values passed from step to step are kept for the gradient. Heads with several layers or a
    window are unrolled by `unroll_feedback`, which is slower.
    """
    if head.config.num_hidden_layers > 1 or any(head.config.windows):
        return unroll_feedback(head, inputs, steps, recompute)
    embeddings, g, segments, positions = inputs
    attention = head.midlayer.self_attn
    following = mx.concatenate([embeddings[:, 1:], embeddings[:, -1:]], axis=1)
    past_keys, past_values = attention.project(head.midlayer.inputs(following, g)[0])[1:]
    mask = causal_mask(segments, positions)

    def draft(step: int, h: mx.array, past_keys: mx.array, past_values: mx.array, *own: mx.array) -> list[mx.array]:
        read = mx.minimum(positions + 1 + step, embeddings.shape[1] - 1)
        x, residual = head.midlayer.inputs(take_rows(embeddings, read), h)
        q, k, v = project_each(attention, x, positions + step)
        if step:  # past_keys already includes those of step 0
            own = (*own, k, v)
        pairs = list(zip(own[::2], own[1::2], strict=True))
        attended = attend(q * attention.scale, past_keys, past_values, mask, pairs)
        return [head.next_feature(head.midlayer.finish(residual, attention.output(attended))), *own[-2:]]

    read = [take_rows(g, positions), past_keys, past_values]
    return run_steps(head, draft, read, steps, recompute, NOT_IN_A_STEP)


def causal_mask(segments: mx.array, positions: mx.array) -> mx.array:
    """Return the additive mask [B, 1, 1, P, L]: the query at index t attends up to t within its segment."""
    own = mx.take_along_axis(segments, positions, axis=1)[..., None]
    seen = (mx.arange(segments.shape[1]) <= positions[..., None]) & (segments[:, None] == own)
    return ((1 - seen.astype(mx.float32)) * HIDDEN)[:, None, None]


def attend(
    q: mx.array, past_keys: mx.array, past_values: mx.array, mask: mx.array, own: list[tuple[mx.array, mx.array]]
) -> mx.array:
    """Attend to shared keys and, for each query, to keys at its own index.

    q [B, heads, P, D], scaled; past keys and values [B, kv_heads, L, D]; mask [B, 1, 1, P, L]; `own` holds keys and
    values [B, kv_heads, P, D]. Returns [B, heads, P, D] in the dtype of q; the softmax is in float32.
    """
    b, heads, count, dim = q.shape
    kv_heads, length = past_keys.shape[1:3]
    groups = heads // kv_heads
    grouped = q.reshape(b, kv_heads, groups, count, dim)
    past = (q.reshape(b, kv_heads, groups * count, dim) @ past_keys.swapaxes(-1, -2)).reshape(
        b, kv_heads, groups, count, length
    ).astype(mx.float32) + mask
    scores = [mx.sum((grouped * k[:, :, None]).astype(mx.float32), axis=-1, keepdims=True) for k, _ in own]
    top = mx.max(past, axis=-1, keepdims=True)
    for score in scores:
        top = mx.maximum(top, score)
    top = mx.stop_gradient(top)
    weights = fastmath.exp(past - top)
    total = mx.sum(weights, axis=-1, keepdims=True)
    shares = weights.reshape(b, kv_heads, groups * count, length).astype(q.dtype)
    out = (shares @ past_values).reshape(grouped.shape)
    for score, (_, v) in zip(scores, own, strict=True):
        weight = fastmath.exp(score - top)
        total = total + weight
        out = out + weight * v[:, :, None]
    return (out * mx.reciprocal(total)).reshape(q.shape).astype(q.dtype)


def project_each(attention: Attention, x: mx.array, positions: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return queries, keys and values [B, heads, P, D] of x [B, P, width] at rotary positions [B, P]."""
    b, count, width = x.shape
    each = attention.project(x.reshape(b * count, 1, width), positions.reshape(-1))
    q, k, v = (y.reshape(b, count, y.shape[1], y.shape[3]).swapaxes(1, 2) for y in each)
    return q, k, v
