"""The layer of DeepSpec's DSpark heads for Gemma 4 (`Gemma4DSparkModel`), and their layout.

Queries are not scaled, values are normed without a weight and may be the keys, each sublayer has a norm before and
after it, and each layer a factor. Source: deepseek-ai/DeepSpec, `deepspec/modeling/dspark/gemma4`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.formats.fields import check
from eagle_mlx.heads.block.config import BlockConfig
from eagle_mlx.heads.block.layers import BlockLayer, ContextAttention, KeysValues
from eagle_mlx.heads.layers import MLP

ARCHITECTURE = "Gemma4DSparkModel"
ACTIVATION = "gelu_pytorch_tanh"
ROPE = ("default", "proportional")


class GemmaAttention(ContextAttention):
    def __init__(self, config: BlockConfig):
        super().__init__(config)
        self.scale, self.eps = 1.0, config.rms_norm_eps
        if config.key_is_value:
            self.pop("v_proj")

    def context(self, c: mx.array, offset: int | mx.array) -> KeysValues:
        b, length, _ = c.shape
        shape = b, length, self.kv_heads, self.head_dim
        k = self.k_proj(c).reshape(shape)
        v = self.v_proj(c).reshape(shape) if "v_proj" in self else k
        v = mx.fast.rms_norm(v, None, self.eps).transpose(0, 2, 1, 3)
        return self.rope(self.k_norm(k).transpose(0, 2, 1, 3), offset=offset), v

    def project(self, x: mx.array, offset: int | mx.array = 0) -> tuple[mx.array, mx.array, mx.array]:
        b, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).reshape(b, length, self.heads, self.head_dim)).transpose(0, 2, 1, 3)
        return self.rope(q, offset=offset), *self.context(x, offset)


class GemmaMLP(MLP):
    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))


class GemmaLayer(BlockLayer):
    def __init__(self, config: BlockConfig):
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn, self.mlp = GemmaAttention(config), GemmaMLP(config)
        self.pre_feedforward_layernorm = nn.RMSNorm(size, eps=eps)
        self.post_feedforward_layernorm = nn.RMSNorm(size, eps=eps)
        self.layer_scalar = mx.ones((1,))

    def __call__(self, x: mx.array, mask: mx.array | None, past: Any, offset: int | mx.array, slots: int) -> mx.array:
        attended = self.self_attn.slots(self.input_layernorm(x), mask, past, offset, slots)
        h = x + self.post_attention_layernorm(attended)
        out: mx.array = h + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(h)))
        return out * self.layer_scalar


def as_qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Gemma config with the names of Qwen3's fields, without RoPE's. Raises ConfigError, KeyError."""
    kv_heads = config["num_global_key_value_heads" if config.get("attention_k_eq_v") else "num_key_value_heads"]
    activation = config.get("hidden_activation")
    check(activation == ACTIVATION, f"hidden_activation is {activation!r}; only {ACTIVATION} is supported")
    left_out = ("rope_parameters", "rope_scaling", "hidden_activation", "partial_rotary_factor")
    kept = {name: value for name, value in config.items() if name not in left_out}
    return {**kept, "head_dim": config["global_head_dim"], "num_key_value_heads": kv_heads}


def gemma_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a BlockConfig that only Gemma's heads have. Raises ConfigError, KeyError."""
    rope = dict((config.get("rope_parameters") or {})["full_attention"])
    theta, kind = float(rope.pop("rope_theta")), rope.pop("rope_type", "default")
    unknown = sorted(rope.keys() - {"partial_rotary_factor", "factor"})
    fields = f" with {', '.join(unknown)}" if unknown else ""
    check(kind in ROPE and not unknown, f"RoPE of type {kind}{fields} is not supported in Gemma's heads")
    return {
        "gemma": True,
        "key_is_value": bool(config.get("attention_k_eq_v")),
        "rope_theta": theta,
        "rope_scaling": {"rope_type": kind, **rope} if kind == "proportional" else None,
        "embedding_scale": float(config["hidden_size"]) ** 0.5,
        "logit_softcap": config.get("final_logit_softcapping"),
    }


def gemma_json(config: BlockConfig) -> dict[str, Any]:
    """Return the fields that `as_qwen3` and `gemma_fields` read, in place of Qwen3's."""
    rope = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    return {
        "model_type": "gemma4_text",
        "hidden_activation": ACTIVATION,
        "attention_k_eq_v": config.key_is_value,
        "global_head_dim": config.head_dim,
        "num_global_key_value_heads": config.num_key_value_heads,
        "rope_parameters": {"full_attention": rope},
        "final_logit_softcapping": config.logit_softcap,
    }
