"""Decoder layers of EAGLE heads, in the shapes of Llama and Qwen3."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations
from mlx_lm.models.rope_utils import initialize_rope

from eagle_mlx.errors import check
from eagle_mlx.formats.fields import Quantization, check_quantization, quantization_json, window_json
from eagle_mlx.heads.base import Mask, layer_mask

_WRITTEN = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"),
    *("head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "attention_bias"),
)
"""Fields of a LayerShape that transformers writes under the same name."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The fields of every EAGLE head's config. Raises ConfigError if they are inconsistent."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # size of the target's vocabulary
    num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    attention_bias: bool = False  # biases on all four attention projections
    qkv_bias: bool = False  # biases on queries, keys and values only
    mlp_bias: bool = False
    qk_norm: bool = False  # per-head norm of queries and keys, as in Qwen3
    windows: tuple[int | None, ...] = ()
    """Each layer's attention window, None for full attention; empty if all layers have full attention."""
    own_embedding: bool = False
    """The head has its own embedding, which it needs if its hidden size differs from the target's."""
    quantization: Quantization | None = None  # None if no layer is quantized

    def __post_init__(self) -> None:
        heads, kv_heads, layers = self.num_attention_heads, self.num_key_value_heads, self.num_hidden_layers
        check(heads % kv_heads == 0, f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        check(layers > 0, f"num_hidden_layers is {layers}; a head has at least one layer")
        check(len(self.windows) in (0, layers), f"windows are given for {len(self.windows)} of {layers} layers")
        check_quantization(self.quantization)

    def window_of(self, layer: int) -> int | None:
        """Return a layer's attention window; None for full attention."""
        return self.windows[layer] if self.windows else None


def layer_json(config: LayerShape) -> dict[str, Any]:
    """Return the config fields of decoder layers, as transformers writes them. Raises ConfigError."""
    return {
        "hidden_act": "silu",
        **{name: getattr(config, name) for name in _WRITTEN},
        "rope_parameters": {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta},
        "tie_word_embeddings": False,
        **window_json(config.windows),
    }


def llama_json(config: LayerShape, architecture: str) -> dict[str, Any]:
    """Return the config of a whole head with its fields at the top level. Raises ConfigError."""
    values = asdict(config)
    del values["own_embedding"], values["windows"], values["quantization"]
    return {
        **{"architectures": [architecture], "model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": False},
        **values,
        **window_json(config.windows),
        **quantization_json(config.quantization),
    }


class Attention(nn.Module):
    """Attention over inputs of `width`, which may be larger than the hidden size.

    `interleaved`: RoPE turns neighboring dimensions instead of the two halves of a head.
    """

    def __init__(self, config: LayerShape, width: int, interleaved: bool = False):
        super().__init__()
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        bias = config.attention_bias or config.qkv_bias
        self.heads, self.kv_heads = heads, kv_heads
        self.scale = dim**-0.5
        self.q_proj = nn.Linear(width, heads * dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=config.attention_bias)
        self.normed = config.qk_norm
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        rope = config.rope_theta, interleaved, config.rope_scaling, config.max_position_embeddings
        self.rope = initialize_rope(dim, *rope)

    def project(self, x: mx.array, offset: int | mx.array = 0) -> tuple[mx.array, mx.array, mx.array]:
        """x [B, L, width] at positions offset + 0..L-1 -> q [B, heads, L, D], k and v [B, kv_heads, L, D]."""
        b, length, _ = x.shape
        q = self.q_proj(x).reshape(b, length, self.heads, -1)
        k = self.k_proj(x).reshape(b, length, self.kv_heads, -1)
        v = self.v_proj(x).reshape(b, length, self.kv_heads, -1).transpose(0, 2, 1, 3)
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (self.rope(part.transpose(0, 2, 1, 3), offset=offset) for part in (q, k))
        return q, k, v

    def output(self, attended: mx.array) -> mx.array:
        """attended [B, heads, L, D] -> [B, L, H]."""
        b, _, length, _ = attended.shape
        return self.o_proj(attended.transpose(0, 2, 1, 3).reshape(b, length, -1))

    def __call__(self, x: mx.array, mask: Mask, cache: Any | None) -> mx.array:
        q, k, v = self.project(x, 0 if cache is None else cache.offset)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        return self.output(mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask))


class MLP(nn.Module):
    def __init__(self, config: LayerShape):
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(activations.swiglu(self.gate_proj(x), self.up_proj(x)))


class PlainLayer(nn.Module):
    """A Llama decoder layer, with or without an input norm."""

    def __init__(self, config: LayerShape, index: int, normed: bool = True):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.window = config.window_of(index)
        self.self_attn = Attention(config, size)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(size, eps=eps) if normed else nn.Identity()
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)

    def inputs(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x [B, L, H] -> the attention's input and the residual, [B, L, H]."""
        return self.input_layernorm(x), x

    def finish(self, residual: mx.array, attended: mx.array) -> mx.array:
        h = residual + attended
        return h + self.mlp(self.post_attention_layernorm(h))

    def run(self, read: mx.array, residual: mx.array, mask: Mask, cache: Any | None) -> mx.array:
        """Apply the layer to the results of `inputs`."""
        mask = layer_mask(cache, read.shape[1], mask, self.window)
        return self.finish(residual, self.self_attn(read, mask, cache))

    def __call__(self, x: mx.array, mask: Mask, cache: Any | None) -> mx.array:
        return self.run(*self.inputs(x), mask, cache)
