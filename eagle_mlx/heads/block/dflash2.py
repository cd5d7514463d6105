"""DFlash2: convolutions over a block's slots, and a selector of candidates that reads the token before each slot.

Source: package `dflash`, `DFlash2DraftModel`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.heads.block.config import BlockConfig
from eagle_mlx.heads.block.layers import BlockLayer


class GroupedConvolution(nn.Module):
    """Two causal convolutions over slots, before and after a sublayer.

    Each kernel is a fixed one per dimension plus one per group of dimensions that depends on the slot.
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.group, self.width = config.conv_group_size, config.conv_kernel_size
        groups = config.hidden_size // self.group
        self.base_kernel = mx.zeros((2, self.width, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.width * groups, bias=False)

    def kernels(self, x: mx.array) -> mx.array:
        """Return both kernels of each slot, [2, width, B, b, H], from the sublayer's input x [B, b, H]."""
        b, slots, size = x.shape
        dynamic = self.kernel_projection(x).reshape(b, slots, 2, self.width, size // self.group)
        dynamic = mx.repeat(dynamic.transpose(2, 3, 0, 1, 4), self.group, axis=-1)
        return dynamic + self.base_kernel[:, :, None, None]

    def __call__(self, x: mx.array, kernel: mx.array) -> mx.array:
        """x [B, b, H] and a kernel [width, B, b, H] -> [B, b, H]; slots before the first are zero."""
        slots = x.shape[1]
        shifted = (mx.pad(x, [(0, 0), (back, 0), (0, 0)])[:, :slots] for back in range(self.width))
        out: mx.array = sum(kernel[back] * each for back, each in enumerate(shifted))  # type: ignore[assignment]
        return out


class ConvolvedLayer(BlockLayer):
    def __init__(self, config: BlockConfig):
        super().__init__(config)
        self.attention_conv, self.mlp_conv = GroupedConvolution(config), GroupedConvolution(config)

    def __call__(self, x: mx.array, mask: mx.array | None, past: Any, offset: int | mx.array) -> mx.array:
        a = self.input_layernorm(x)
        before, after = self.attention_conv.kernels(a)
        attended = self.self_attn.slots(self.attention_conv(a, before), mask, past, offset)
        h = x + self.attention_conv(attended, after)
        a = self.post_attention_layernorm(h)
        before, after = self.mlp_conv.kernels(a)
        out: mx.array = h + self.mlp_conv(self.mlp(self.mlp_conv(a, before)), after)
        return out


class CandidateSelector(nn.Module):
    """Scores each slot's likeliest tokens by the token before; no other token is drafted."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.count = config.selector_top_k
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)
        self.predecessor_codebook = nn.Embedding(config.vocab_size, config.selector_rank)
        self.successor_codebook = nn.Embedding(config.vocab_size, config.selector_rank)

    def __call__(self, previous: mx.array, h: mx.array, logits: mx.array) -> mx.array:
        """Previous tokens [...] int32, states [..., H] and logits [..., V] -> logits [..., V].

        They are minus infinity for all but the candidates.
        """
        candidates = mx.argpartition(-logits, self.count - 1, axis=-1)[..., : self.count]
        read = self.predecessor_codebook(previous) * self.hidden_projection(h)
        pairs = (read[..., None, :] * self.successor_codebook(candidates)).sum(axis=-1)
        scores = mx.take_along_axis(logits, candidates, axis=-1) + pairs
        return mx.put_along_axis(mx.full(logits.shape, -mx.inf, logits.dtype), candidates, scores, axis=-1)
