"""MTP layers in folders of their own, loaded and run by mlx-vlm's own class on the CPU.

python -m venv v; v/bin/pip install mlx-vlm==0.7.10 "mlx[cpu]"; v/bin/python tests/golden/make_split.py
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import draws
import mlx.core as mx
import numpy as np
from make import last_hidden_state, target, unroll, write
from mlx_vlm.speculative.drafters import load_drafter

LAYER: dict[str, Any] = {
    **{"hidden_size": draws.HIDDEN, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 16, "num_hidden_layers": 4, "full_attention_interval": 4, "vocab_size": draws.VOCAB},
    **{"rms_norm_eps": 1e-5, "max_position_embeddings": 512, "tie_word_embeddings": False, "attention_bias": False},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"linear_conv_kernel_dim": 4, "mtp_num_hidden_layers": 1, "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    "rope_parameters": {
        **{"type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    },
}
EXPERTS: dict[str, Any] = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    **{"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": []},
}
SIZE, KV = draws.HIDDEN, 32
SHAPES: dict[str, tuple[int, ...]] = {
    **{f"{name}.weight": (SIZE,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")},
    **{f"layers.0.{name}_layernorm.weight": (SIZE,) for name in ("input", "post_attention")},
    **{f"layers.0.self_attn.{name}_norm.weight": (16,) for name in "qk"},
    "fc.weight": (SIZE, 2 * SIZE),
    "layers.0.self_attn.q_proj.weight": (2 * SIZE, SIZE),
    "layers.0.self_attn.o_proj.weight": (SIZE, SIZE),
    **{f"layers.0.self_attn.{name}_proj.weight": (KV, SIZE) for name in "kv"},
}


def mlp(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
    up = {f"{prefix}.{name}_proj.weight": (inner, SIZE) for name in ("gate", "up")}
    return {**up, f"{prefix}.down_proj.weight": (SIZE, inner)}


ROUTED = {
    "layers.0.mlp.gate.weight": (4, SIZE),
    "layers.0.mlp.shared_expert_gate.weight": (1, SIZE),
    **mlp("layers.0.mlp.shared_expert", 32),
}
STACKED = {name: (4, *shape) for name, shape in mlp("layers.0.mlp.switch_mlp", 24).items()}
FUSED = {
    "layers.0.mlp.experts.gate_up_proj": (4, 48, SIZE),
    "layers.0.mlp.experts.down_proj": (4, SIZE, 24),
}


def make_split(
    name: str, kind: str, layer: dict[str, Any], own: dict[str, Any], bits: int = 0, raw: bool = False
) -> None:
    """`raw`: published names with `mtp.` and zero-centered norms. `bits`: quantized in groups of 32."""
    config: dict[str, Any] = {"model_type": "qwen3_5_mtp", "block_size": 3, "tie_word_embeddings": False}
    config["text_config"] = {**LAYER, **layer, "model_type": kind}
    if bits:
        quantization = {"group_size": 32, "bits": bits, "mode": "affine"}
        config |= {"quantization": quantization, "quantization_config": quantization}
    shapes = {f"mtp.{key}" if raw else key: shape for key, shape in {**SHAPES, **own}.items()}
    minus = tuple(key for key, shape in shapes.items() if raw and len(shape) == 1)
    tensors: dict[str, mx.array] = {}
    for key, shape in shapes.items():
        value = mx.array(draws.draw(key, shape) - (key in minus))
        tensors |= draws.packed(key, value, config.get("quantization"))
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        mx.save_safetensors(f"{folder}/model.safetensors", tensors)
        model, _ = load_drafter(folder)

    def step(embeddings: np.ndarray, g: np.ndarray) -> np.ndarray:
        inputs = [mx.array(x.astype(np.float32))[None] for x in (embeddings, g)]
        return np.array(model._forward_hidden(*inputs, None, mx.arange(len(g))[None])[0], np.float64)

    projection = target("lm_head").T
    made = unroll(step, lambda h: h @ projection, np.array, target("embed_tokens"), last_hidden_state())
    write(name, config, shapes, minus_one=minus, **made)


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    dense = mlp("layers.0.mlp", 80)
    make_split("mlx-vlm-mtp-qwen3.5", "qwen3_5_text", {}, dense)
    make_split("mlx-vlm-mtp-8-bits", "qwen3_5_text", {}, dense, bits=8)
    make_split("mlx-vlm-mtp-raw", "qwen3_5_moe_text", EXPERTS, {**ROUTED, **FUSED}, raw=True)
    make_split("mlx-vlm-mtp-qwen3-next", "qwen3_next", EXPERTS, {**ROUTED, **STACKED}, bits=4)
