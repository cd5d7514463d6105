"""All blocks of a batch in one forward: each anchor has a block of its own, and all share the row's context.

Sources: vllm-project/speculators and deepseek-ai/DeepSpec, whose trainers mask one long sequence instead.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from eagle_mlx.cpu import fastmath
from eagle_mlx.heads.block import BlockHead
from eagle_mlx.heads.block.config import BlockAttention
from eagle_mlx.heads.block.layers import BlockLayer

from ...unroll import HIDDEN, Inputs, Step, recomputed, take_rows
from ..base import Head


def unroll_blocks(head: BlockHead, inputs: Inputs, steps: int, recompute: bool = False) -> list[mx.array]:
    """Return the normed states of the first `steps` drafts of each anchor's block: `steps` times [B, A, H].

    A block sees the context strictly before its anchor, as in decoding: the target has not read the newest token yet.

    With `recompute`, only the inputs of each layer are kept for the gradient.
    """
    embeddings, g, segments, anchors = inputs
    config = head.config
    b, count = anchors.shape
    mask_token = head.embed(mx.array([config.mask_token_id])).astype(embeddings.dtype)
    newest = take_rows(embeddings, anchors)[:, :, None]
    masks = mx.broadcast_to(mask_token, (b, count, config.block_size - 1, newest.shape[-1]))
    x = mx.concatenate([newest, masks], axis=2).reshape(b * count, config.block_size, -1)
    for index, layer in enumerate(head.layers):
        step: Step = partial(_layer, layer, config.sees(index), segments, anchors)
        step = recomputed(layer, step) if recompute else step
        (x,) = step(x, g)
    first = 0 if config.first_slot_drafts else 1
    slots = head.norm(x).reshape(b, count, config.block_size, -1)
    return [slots[:, :, first + step] for step in range(steps)]


def with_latents(head: Head, outputs: list[mx.array], tokens: mx.array, anchors: mx.array) -> list[mx.array]:
    """Append the inputs of the Markov head's last matrix, for the true tokens [B, L], to each slot's states [B, A, H].

    Returns arrays [B, A, H + r]. A recurrent head's state is that after the slots before.
    """
    state, found = None, []
    for slot, h in enumerate(outputs):
        before = mx.take_along_axis(tokens, mx.minimum(anchors + slot, tokens.shape[1] - 1), axis=1)
        latent, state = head.markov_head.latent(before, h, state)
        found.append(mx.concatenate([h, latent], axis=-1))
    return found


def _layer(
    layer: BlockLayer, sees: BlockAttention, segments: mx.array, anchors: mx.array, x: mx.array, g: mx.array
) -> list[mx.array]:
    """x [B * A, b, H], g [B, L, H] -> [B * A, b, H]."""
    past_keys, past_values = layer.self_attn.context(g, 0)
    context, block = _masks(sees, segments, anchors, x.shape[1])

    def attended(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return attend(q, past_keys, past_values, context, k, v, block)

    return [layer(x, None, attended, anchors.reshape(-1), x.shape[1])]


def _masks(sees: BlockAttention, segments: mx.array, anchors: mx.array, slots: int) -> tuple[mx.array, mx.array]:
    """Return additive masks: [B, A, b or 1, L] for the context, [b, b] for the block."""
    keys, slot = mx.arange(segments.shape[1]), mx.arange(slots)
    anchor = anchors[..., None, None]
    own = mx.take_along_axis(segments, anchors, axis=1)[..., None, None]
    context = (keys < anchor) & (segments[:, None, None] == own)
    block = slot <= slot[:, None] if sees.causal else mx.ones((slots, slots), mx.bool_)
    if sees.window is not None and sees.window_start == "slot":
        context = context & (keys > anchor + slot[:, None] - sees.window)
        block = block & (slot > slot[:, None] - sees.window)
    elif sees.window is not None:
        context = context & (keys >= anchor - sees.window)
    return (1 - context.astype(mx.float32)) * HIDDEN, (1 - block.astype(mx.float32)) * HIDDEN


def attend(
    q: mx.array,
    past_keys: mx.array,
    past_values: mx.array,
    context: mx.array,
    keys: mx.array,
    values: mx.array,
    block: mx.array,
) -> mx.array:
    """Attend to the row's context and to each block's own slots.

    q [B * A, heads, b, D], scaled; past keys and values [B, kv_heads, L, D]; keys and values of the blocks
    [B * A, kv_heads, b, D]; masks as from `_masks`. Returns [B * A, heads, b, D] in the dtype of q; the softmax is in
    float32.
    """
    b, kv_heads, length, dim = past_keys.shape
    blocks, heads, slots, _ = q.shape
    count, groups = blocks // b, heads // kv_heads

    def by_head(x: mx.array) -> mx.array:
        """[B * A, heads, b, D] -> [B, kv_heads, heads / kv_heads, A, b, D]."""
        return x.reshape(b, count, kv_heads, -1, slots, dim).transpose(0, 2, 3, 1, 4, 5)

    grouped, keys, values = by_head(q), by_head(keys), by_head(values)
    flat = grouped.reshape(b, kv_heads, groups * count * slots, dim)
    shape = b, kv_heads, groups, count, slots, length
    past = (flat @ past_keys.swapaxes(-1, -2)).reshape(shape).astype(mx.float32) + context[:, None, None]
    own = (grouped @ keys.swapaxes(-1, -2)).astype(mx.float32) + block
    top = mx.maximum(mx.max(past, axis=-1, keepdims=True), mx.max(own, axis=-1, keepdims=True))
    top = mx.stop_gradient(top)
    past, own = fastmath.exp(past - top), fastmath.exp(own - top)
    total = mx.sum(past, axis=-1, keepdims=True) + mx.sum(own, axis=-1, keepdims=True)
    out = (past.reshape(b, kv_heads, -1, length).astype(q.dtype) @ past_values).reshape(grouped.shape)
    out = (out + own.astype(q.dtype) @ values) * mx.reciprocal(total)
    return out.transpose(0, 3, 1, 2, 4, 5).reshape(q.shape).astype(q.dtype)
