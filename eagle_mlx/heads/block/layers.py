"""Decoder layers of block drafters: slots attend to the context and to their own block."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope

from eagle_mlx.heads.block.config import BlockConfig
from eagle_mlx.heads.layers import MLP, Attention

KeysValues = tuple[mx.array, mx.array]
"""Keys and values, each [B, kv_heads, L, D]."""


class ContextAttention(Attention):
    """Attention of a block's slots to the context's keys and values, followed by the block's own."""

    def __init__(self, config: BlockConfig):
        super().__init__(config, config.hidden_size)
        self.head_dim = config.head_dim
        if config.interleaved_rope:
            self.rope = initialize_rope(
                config.head_dim, config.rope_theta, True, config.rope_scaling, config.max_position_embeddings
            )

    def context(self, c: mx.array, offset: int | mx.array) -> KeysValues:
        """Context features c [B, L, H] at positions offset + 0..L-1 -> their keys and values."""
        b, length, _ = c.shape
        k = self.k_proj(c).reshape(b, length, self.kv_heads, self.head_dim)
        v = self.v_proj(c).reshape(b, length, self.kv_heads, self.head_dim).transpose(0, 2, 1, 3)
        k = self.k_norm(k) if self.normed else k
        return self.rope(k.transpose(0, 2, 1, 3), offset=offset), v

    def slots(self, x: mx.array, mask: mx.array | None, past: Any, offset: int | mx.array) -> mx.array:
        """x [B, b, H] of a block at positions offset + 0..b-1 -> [B, b, H].

        past: the layer's cache, or keys and values of the context.
        """
        q, k, v = self.project(x, offset)
        if isinstance(past, tuple):
            k, v = mx.concatenate([past[0], k], axis=2), mx.concatenate([past[1], v], axis=2)
        else:
            k, v = past.update_and_fetch(k, v)
        return self.output(mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask))


class BlockLayer(nn.Module):
    """A Qwen3 decoder layer whose attention also reads the context."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = ContextAttention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)

    def __call__(self, x: mx.array, mask: mx.array | None, past: Any, offset: int | mx.array) -> mx.array:
        """x [B, b, H] -> [B, b, H]; other arguments as in `ContextAttention.slots`."""
        h = x + self.self_attn.slots(self.input_layernorm(x), mask, past, offset)
        out: mx.array = h + self.mlp(self.post_attention_layernorm(h))
        return out
