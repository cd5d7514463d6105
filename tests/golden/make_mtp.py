"""MTP heads by transformers' decoder layers and by speculators; called by make.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import draws
import numpy as np
import plain
import torch
from make import last_hidden_state, saved, target, unroll, write
from torch import nn

SIZES: dict[str, Any] = {
    "hidden_size": draws.HIDDEN,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": draws.VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
}
ROUTED = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
QWEN = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

Run = Callable[[np.ndarray], np.ndarray]


def runner(layer: nn.Module, rotary: nn.Module, prefix: str, minus_one: bool) -> tuple[Run, dict[str, Any]]:
    """A decoder layer with drawn weights as a function over [L, H], and its tensors' published names and shapes."""
    shapes: dict[str, Any] = {}

    def drawn(name: str, shape: Any) -> np.ndarray:
        shapes[prefix + name] = tuple(shape)
        value = draws.draw(prefix + name, shape)
        return value - 1 if minus_one and len(shape) == 1 and "norm" in name else value

    state = {}
    for name, value in layer.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            count, both, size = value.shape
            stem, half = name.removesuffix("gate_up_proj"), (both // 2, size)
            experts = [[drawn(f"{stem}{e}.{part}_proj.weight", half) for part in ("gate", "up")] for e in range(count)]
            state[name] = torch.tensor(np.stack([np.concatenate(parts) for parts in experts]))
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            state[name] = torch.tensor(
                np.stack([drawn(f"{stem}{e}.down_proj.weight", value.shape[1:]) for e in range(len(value))])
            )
        else:
            state[name] = torch.tensor(drawn(name, value.shape))
    layer.load_state_dict(state)
    layer.double().eval()
    rotary.double()

    def run(x: np.ndarray) -> np.ndarray:
        states = torch.tensor(x)[None]
        positions = torch.arange(len(x))[None]
        ahead = torch.full((len(x), len(x)), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        with torch.no_grad():
            turns = rotary(states, positions)
            out = layer(states, attention_mask=ahead, position_ids=positions, position_embeddings=turns)
        return (out[0] if isinstance(out, tuple) else out)[0].numpy()

    return run, shapes


def make_mtp(
    name: str,
    fields: dict[str, Any],
    config: Any,
    layer: Callable[[Any], nn.Module],
    rotary: type,
    prefix: str,
    around: dict[str, str],
    *,
    within: str = "",
    hidden_first: bool = False,
    recycle_norm: bool = False,
    minus_one: bool = False,
    ends: dict[str, str] | None = None,
) -> None:
    """`around` names the norms and the projection, `ends` an embedding and an output projection of the head's own."""
    config._attn_implementation = "eager"
    run, shapes = runner(layer(config), rotary(config), prefix + within, minus_one)
    size = draws.HIDDEN
    own = {"enorm": (size,), "hnorm": (size,), "norm": (size,), "eh_proj": (size, 2 * size)}
    own = {part: (f"{prefix}{around[part]}.weight", shape) for part, shape in own.items()}
    own |= {part: (f"{prefix}{where}.weight", (draws.VOCAB, size)) for part, where in (ends or {}).items()}
    shapes |= dict(own.values())
    weights = {part: draws.draw(*where).astype(np.float64) for part, where in own.items()}
    eps = fields["rms_norm_eps"]

    def step(embeddings: np.ndarray, g: np.ndarray) -> np.ndarray:
        parts = [plain.rms(embeddings, weights["enorm"], eps), plain.rms(g, weights["hnorm"], eps)]
        return run(np.concatenate(parts[::-1] if hidden_first else parts, axis=-1) @ weights["eh_proj"].T)

    norm = lambda h: plain.rms(h, weights["norm"], eps)  # noqa: E731
    projection, embed = weights.get("lm_head", target("lm_head")), weights.get("embed_tokens", target("embed_tokens"))
    logits = lambda h: norm(h) @ projection.T  # noqa: E731
    made = unroll(step, logits, norm if recycle_norm else np.array, embed, last_hidden_state())
    minus = [key for key, shape in shapes.items() if len(shape) == 1 and "norm" in key] if minus_one else []
    write(name, fields, shapes, minus_one=tuple(minus), **made)


def make_published() -> None:
    make_deepseek()
    make_mimo()
    make_qwen()


def make_deepseek() -> None:
    """DeepSeek-V3, and GLM-4.5, which has the same names."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
    from transformers.models.glm4_moe import modeling_glm4_moe as glm

    around = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}
    ends = {"embed_tokens": "embed_tokens", "lm_head": "shared_head.head"}
    fields = {
        "model_type": "deepseek_v3",
        **SIZES,
        **ROUTED,
        **LATENT,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
    }
    make_mtp(
        "mtp-deepseek-v3",
        fields,
        deepseek.DeepseekV3Config(**without_type(fields)),
        lambda c: deepseek.DeepseekV3DecoderLayer(c, 3),
        deepseek.DeepseekV3RotaryEmbedding,
        "model.layers.3.",
        around,
        ends=ends,
    )
    fields = {
        "model_type": "glm4_moe",
        **SIZES,
        **ROUTED,
        "n_group": 1,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "num_nextn_predict_layers": 1,
    }
    make_mtp(
        "mtp-glm-4.5",
        fields,
        glm.Glm4MoeConfig(**without_type(fields)),
        lambda c: glm.Glm4MoeDecoderLayer(c, 2),
        glm.Glm4MoeRotaryEmbedding,
        "model.layers.2.",
        around,
        ends=ends,
    )


def make_mimo() -> None:
    from transformers.models.qwen2 import modeling_qwen2 as qwen2

    around = {
        "enorm": "token_layernorm",
        "hnorm": "hidden_layernorm",
        "eh_proj": "input_proj",
        "norm": "final_layernorm",
    }
    fields = {"model_type": "mimo", **SIZES, "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    make_mtp(
        "mtp-mimo",
        fields,
        qwen2.Qwen2Config(**without_type(fields)),
        lambda c: qwen2.Qwen2DecoderLayer(c, 0),
        qwen2.Qwen2RotaryEmbedding,
        "model.mtp_layers.0.",
        around,
        hidden_first=True,
        recycle_norm=True,
    )


def make_qwen() -> None:
    """Qwen3-Next and Qwen3.5."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    around = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}
    fields = {"model_type": "qwen3_next", **SIZES, **QWEN, **EXPERTS, "partial_rotary_factor": 0.5}
    make_mtp(
        "mtp-qwen3-next",
        fields,
        qwen3_next.Qwen3NextConfig(**without_type(fields)),
        lambda c: qwen3_next.Qwen3NextDecoderLayer(c, 3),
        qwen3_next.Qwen3NextRotaryEmbedding,
        "mtp.",
        around,
        within="layers.0.",
        recycle_norm=True,
        minus_one=True,
    )
    rope = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    text = {"model_type": "qwen3_5_text", **SIZES, **QWEN, "rope_parameters": rope, "mtp_num_hidden_layers": 1}
    make_mtp(
        "mtp-qwen3.5",
        text,
        qwen3_5.Qwen3_5TextConfig(**without_type(text)),
        lambda c: qwen3_5.Qwen3_5DecoderLayer(c, 3),
        qwen3_5.Qwen3_5TextRotaryEmbedding,
        "mtp.",
        around,
        within="layers.0.",
        recycle_norm=True,
        minus_one=True,
    )


def without_type(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != "model_type"}


def make_speculators(name: str, layer: Any) -> None:
    """The layer's own steps over the whole sequence; of the model's forward the first step must be the same."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer._attn_implementation = "eager"
    config = MTPSpeculatorConfig(
        transformer_layer_config=layer,
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    model = MTPDraftModel(config).float().eval()
    del model.verifier_lm_head  # as speculators does before it trains
    written, shapes = saved(model)
    minus = tuple(key for key, shape in shapes.items() if len(shape) == 1 and "norm" in key and "qwen3_next" in name)
    state = {key: torch.tensor(draws.draw(key, shape) - (key in minus)) for key, shape in shapes.items()}
    shared = {f"{part}.weight": torch.tensor(draws.target(part)) for part in ("embed_tokens", "lm_head")}
    model.load_state_dict(state | shared)
    block, embed = model.mtp_layers[0], target("embed_tokens").astype(np.float32)

    def step(embeddings: np.ndarray, g: np.ndarray) -> np.ndarray:
        states, tokens = torch.tensor(g)[None], torch.tensor(embeddings)[None]
        positions = torch.arange(len(g))[None]
        ahead = torch.full((len(g), len(g)), float("-inf")).triu(1)[None, None]
        with torch.no_grad():
            turns = model.rotary_emb(states, positions)
            out = block(states, tokens, attention_mask=ahead, position_ids=positions, position_embeddings=turns)
        return np.asarray(out[0])

    g = draws.aux(-1)
    made = unroll(step, lambda h: h @ target("lm_head").T.astype(np.float32), np.array, embed, g)
    with torch.no_grad():
        [first], _, _ = model(
            torch.tensor(draws.TOKENS[: draws.LENGTH + 2])[None], torch.tensor(np.pad(g, ((0, 2), (0, 0))))[None]
        )
    assert np.abs(first[0].numpy() - made["first"][: first.shape[1]]).max() < 1e-4
    write(name, written, shapes, minus_one=minus, **made)


def make_all_mtp() -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

    make_published()
    make_speculators("speculators-mtp-qwen3", Qwen3Config(**SIZES, head_dim=16, num_hidden_layers=4))
    make_speculators("speculators-mtp-qwen3_next", Qwen3NextConfig(**SIZES, **QWEN, **EXPERTS))
