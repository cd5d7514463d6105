"""The EAGLE-3 head: one decoder layer over the next token's embedding and three target layers' hidden states.

Source: Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test";
tensor names and flags as in SafeAILab/EAGLE and sgl-project/SpecForge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope

from eagle_mlx import fastmath
from eagle_mlx.errors import ConfigError


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose outputs a head reads by default, counted from 0: a low, a middle and a high one."""
    if num_layers < 6:
        return (0, num_layers // 2, num_layers - 1)
    return (1, num_layers // 2 - 1, num_layers - 4)


@dataclass(frozen=True)
class Eagle3Config:
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """Entries of the target's vocabulary."""
    draft_vocab_size: int
    """Entries that the head can draft; equal to `vocab_size` when it drafts all of them."""
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    """Target layers whose outputs are read, counted from 0."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    norm_before_residual: bool = False
    """The residual stream starts from the normed feature instead of the feature."""
    attention_bias: bool = False

    def __post_init__(self) -> None:
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(
                f"draft_vocab_size {self.draft_vocab_size} is larger than the target's vocabulary {self.vocab_size}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if not self.aux_layers:
            raise ConfigError("aux_layers is empty; an EAGLE-3 head reads at least one target layer")


class Attention(nn.Module):
    def __init__(self, config: Eagle3Config):
        super().__init__()
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        width, bias = 2 * config.hidden_size, config.attention_bias
        self.heads, self.kv_heads, self.scale = heads, kv_heads, dim**-0.5
        self.q_proj = nn.Linear(width, heads * dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=bias)
        self.rope = initialize_rope(dim, config.rope_theta, False, config.rope_scaling, config.max_position_embeddings)

    def project(self, x: mx.array, offset: int | mx.array = 0) -> tuple[mx.array, mx.array, mx.array]:
        """x [B, L, 2H] at positions offset + 0..L-1 -> q [B, heads, L, D], k and v [B, kv_heads, L, D]."""
        b, length, _ = x.shape
        q = self.q_proj(x).reshape(b, length, self.heads, -1).transpose(0, 2, 1, 3)
        k = self.k_proj(x).reshape(b, length, self.kv_heads, -1).transpose(0, 2, 1, 3)
        v = self.v_proj(x).reshape(b, length, self.kv_heads, -1).transpose(0, 2, 1, 3)
        return self.rope(q, offset=offset), self.rope(k, offset=offset), v

    def output(self, attended: mx.array) -> mx.array:
        """attended [B, heads, L, D] -> [B, L, H]."""
        b, _, length, _ = attended.shape
        out: mx.array = self.o_proj(attended.transpose(0, 2, 1, 3).reshape(b, length, -1))
        return out

    def __call__(self, x: mx.array, mask: mx.array | str | None, cache: Any | None) -> mx.array:
        q, k, v = self.project(x, 0 if cache is None else cache.offset)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        return self.output(mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask))


class MLP(nn.Module):
    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.down_proj(fastmath.swiglu(self.gate_proj(x), self.up_proj(x)))
        return out


class DecoderLayer(nn.Module):
    def __init__(self, config: Eagle3Config):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)

    def inputs(self, embeddings: mx.array, g: mx.array) -> tuple[mx.array, mx.array]:
        """Embeddings and features [B, L, H] -> the attention's input [B, L, 2H] and the residual [B, L, H]."""
        normed = self.hidden_norm(g)
        x = mx.concatenate([self.input_layernorm(embeddings), normed], axis=-1)
        return x, normed if self.norm_before_residual else g

    def finish(self, residual: mx.array, attended: mx.array) -> mx.array:
        """Add the attention's output to the residual and pass both through the MLP."""
        h = residual + attended
        out: mx.array = h + self.mlp(self.post_attention_layernorm(h))
        return out


class Eagle3Head(nn.Module):
    """An EAGLE-3 head. Its embedding is the target's, so inputs are embeddings, not tokens.

    `d2t` [draft_vocab_size] is the offset of each draft id to its target id; None where the vocabularies are equal.
    """

    def __init__(self, config: Eagle3Config, d2t: mx.array | None = None):
        super().__init__()
        if (d2t is None) != (config.draft_vocab_size == config.vocab_size):
            raise ConfigError("a head needs d2t exactly when its draft vocabulary is smaller than the target's")
        self._config = config
        self._d2t = d2t if d2t is None else d2t.astype(mx.int32)
        self._token_ids = d2t if d2t is None else mx.arange(d2t.size, dtype=mx.int32) + d2t.astype(mx.int32)
        self.fc = nn.Linear(config.target_hidden_size * len(config.aux_layers), config.hidden_size, bias=False)
        self.midlayer = DecoderLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    @property
    def config(self) -> Eagle3Config:
        return self._config

    @property
    def d2t(self) -> mx.array | None:
        return self._d2t

    @property
    def token_ids(self) -> mx.array | None:
        """[draft_vocab_size] int32, the target's id of each draft id; None where they are the same."""
        return self._token_ids

    def features(self, aux: Sequence[mx.array]) -> mx.array:
        """The target's aux hidden states, each [B, L, target_hidden_size] -> features g [B, L, H]."""
        out: mx.array = self.fc(mx.concatenate(list(aux), axis=-1))
        return out

    def inputs(self, embeddings: mx.array, g: mx.array) -> tuple[mx.array, mx.array]:
        return self.midlayer.inputs(embeddings, g)

    def __call__(
        self, embeddings: mx.array, g: mx.array, cache: Any | None = None, mask: mx.array | str | None = None
    ) -> mx.array:
        """One pass of the decoder layer.

        embeddings [B, L, H] of tokens t+1, features g [B, L, H] of positions t -> h [B, L, H] before the final norm,
        which is also the feature of the next draft step.
        """
        x, residual = self.midlayer.inputs(embeddings, g)
        return self.midlayer.finish(residual, self.midlayer.self_attn(x, mask, cache))

    def logits(self, h: mx.array) -> mx.array:
        """h [..., H] -> logits over the draft vocabulary [..., draft_vocab_size]."""
        out: mx.array = self.lm_head(self.norm(h))
        return out

    def to_target(self, draft_ids: mx.array) -> mx.array:
        """Draft ids -> target ids, any shape."""
        return draft_ids if self._token_ids is None else self._token_ids[draft_ids]
