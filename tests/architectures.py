"""Tiny configurations of mlx-lm's architectures, as differences from a common small shape.

Windows and chunks are a few positions long, so that a short text wraps around them several times.
"""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn

VOCAB = 96

COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
}
"""What most modules need; each takes the fields that it knows."""

HEADS = {"head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": []}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
ROUTED |= {"first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 8}
SLIDING = ["sliding_attention", "full_attention"] * 2
GATED_DELTA = {
    **HEADS,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
    "shared_expert_intermediate_size": 32,
}
SHORT_CONV = {
    "conv_bias": True,
    "conv_L_cache": 3,
    "full_attn_idxs": [1, 3],
    "block_dim": 32,
    "block_ff_dim": 64,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "num_dense_layers": 2,
    "use_expert_bias": True,
}
LLAMA4 = {
    **COMMON,
    **HEADS,
    "model_type": "llama4",
    "attention_chunk_size": 8,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 64,
    "num_experts_per_tok": 1,
    "num_local_experts": 2,
    "rope_scaling": None,
    "use_qk_norm": True,
}
GEMMA3 = {**HEADS, "num_key_value_heads": 1, "sliding_window": 8, "sliding_window_pattern": 2}
GEMMA4 = {
    **COMMON,
    **HEADS,
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": VOCAB,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0},
        "sliding_attention": {"rope_theta": 1000.0},
    },
}
GEMMA3N = {
    **COMMON,
    **HEADS,
    "model_type": "gemma3n",
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB,
    "sliding_window": 8,
    "rope_local_base_freq": 100.0,
    "final_logit_softcapping": 30.0,
    "layer_types": SLIDING,
    "activation_sparsity_pattern": [0.5] * 4,
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 4,
    "altup_coef_clip": 1.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}
LONGCAT = {
    **LATENT,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 32,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
MAMBA2 = {
    "mamba_num_heads": 4,
    "mamba_n_heads": 4,
    "mamba_head_dim": 16,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_proj_bias": False,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "mamba_d_conv": 3,
    "conv_kernel": 3,
    "mamba_n_groups": 1,
    "n_groups": 2,
    "mamba_conv_bias": True,
    "use_conv_bias": True,
    "use_bias": False,
    "time_step_limit": [0.01, 10.0],
}
DEFAULT_ROPE = {"rope_type": "default", "type": "default", "rope_theta": 1000.0}
DEEPSEEK_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
    "type": "yarn",
}
LONGROPE = {
    "long_factor": [1.0] * 4,
    "short_factor": [1.0] * 4,
    "long_mscale": 1.2,
    "short_mscale": 1.2,
    "original_max_position_embeddings": 4096,
    "type": "longrope",
}

CONFIGS: dict[str, dict[str, Any]] = {
    "Klear": {**EXPERTS, "num_key_value_heads": 4, "n_shared_experts": 1},
    "afm7": {"hidden_dim": 32, "num_layers": 6, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "afmoe": {**EXPERTS, **HEADS, "layer_types": SLIDING, "sliding_window": 8, "num_dense_layers": 1},
    "apertus": {"post_norm": True, "qk_norm": True},
    "baichuan_m1": {"sliding_window": 8, "sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {
        **HEADS, **LATENT, **EXPERTS, "num_key_value_heads": 4, "num_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "layer_group_size": 2, "group_norm_size": 1,
    },
    "bailing_moe": {**EXPERTS, "num_shared_experts": 1, "first_k_dense_replace": 2},
    "bailing_moe_linear": {**EXPERTS, "num_key_value_heads": 4, "num_shared_experts": 1, "first_k_dense_replace": 0,
                           "layer_group_size": 2, "group_norm_size": 1},
    "bailing_moe_v3": {
        **HEADS, **LATENT, **EXPERTS, "moe_shared_expert_intermediate_size": 32, "num_shared_experts": 1,
        "n_group": 2, "topk_group": 1, "layer_group_size": 2, "short_conv_kernel_size": 3,
    },
    "cohere": {},
    "cohere2": {"head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2},
    "dbrx": {
        "d_model": 32, "n_layers": 2, "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000},
    },
    "deepseek": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "deepseek_v2": {**ROUTED, **LATENT, "topk_method": "greedy", "rope_scaling": DEEPSEEK_YARN},
    "deepseek_v3": {**ROUTED, **LATENT, "rope_scaling": DEEPSEEK_YARN},
    "deepseek_v32": {**ROUTED, **LATENT, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 2},
    "dots1": {**ROUTED},
    "ernie4_5": {"use_bias": False, "head_dim": 8},
    "ernie4_5_moe": {"use_bias": False, "moe_num_experts": 4},
    "exaone": {"num_layers": 4},
    "exaone4": {"head_dim": 8, "sliding_window": 8, "sliding_window_pattern": "LLGL", "rope_scaling": None},
    "exaone_moe": {
        **EXPERTS, **HEADS, "num_shared_experts": 1, "n_group": 1, "topk_group": 1, "sliding_window": 8,
        "layer_types": SLIDING, "is_moe_layer": [False, True, True, True],
    },
    "falcon_h1": {**HEADS, **MAMBA2},
    "gear": {
        **HEADS, "sliding_window": 8,
        "layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"],
    },
    "gemma": {**HEADS},
    "gemma2": {**HEADS},
    "gemma3": {"text_config": {**COMMON, **GEMMA3, "model_type": "gemma3_text"}, "vocab_size": VOCAB},
    "gemma3_text": GEMMA3,
    "gemma3n": {"text_config": GEMMA3N},
    "gemma4": {"text_config": GEMMA4},
    "gemma4_text": GEMMA4,
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8, "partial_rotary_factor": 0.5},
    "glm4_moe": {**ROUTED, "head_dim": 8, "rope_scaling": None, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": {
        **ROUTED, **LATENT, "num_key_value_heads": 4, "rope_scaling": None, "partial_rotary_factor": 1.0,
        "num_nextn_predict_layers": 1,
    },
    "glm_moe_dsa": {
        **ROUTED, **LATENT, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 2, "rope_parameters": DEFAULT_ROPE,
    },
    "gpt2": {"n_ctx": 512, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 512},
    "gpt2:short": {"n_ctx": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_inner": 64, "n_head": 4, "n_positions": 512},
    "gpt_neox": {"rotary_emb_base": 10_000, "rotary_pct": 0.5},
    "gpt_oss": {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "layer_types": SLIDING},
    "gptj": {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 8},
    "granite": {"logits_scaling": 1.0, "attention_multiplier": 0.3, "embedding_multiplier": 1.0,
                "residual_multiplier": 1.0},
    "granitemoe": {"logits_scaling": 1.0, "attention_multiplier": 0.3, "embedding_multiplier": 1.0,
                   "residual_multiplier": 1.0, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {
        **MAMBA2, "logits_scaling": 1.0, "attention_multiplier": 0.3, "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"] * 2,
    },
    "helium": {"head_dim": 8},
    "hunyuan": {
        "moe_topk": 2, "num_experts": 2, "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_qk_norm": True,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}, "use_cla": True, "cla_share_factor": 2,
    },
    "hunyuan_v1_dense": {
        "use_qk_norm": True, "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic", "beta_fast": 32,
                                              "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.0,
                                              "original_max_position_embeddings": 8192},
    },
    "internlm2": {},
    "internlm3": {},
    "iquestloopcoder": {"head_dim": 8, "num_hidden_layers": 2, "loop_num": 2, "loop_window_size": 8},
    "jamba": {
        **EXPERTS, "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
        "expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2,
    },
    "kimi_k25": {"text_config": {**COMMON, **ROUTED, **LATENT, "model_type": "kimi_k25"}},
    "kimi_linear": {
        **HEADS, **LATENT, "linear_attn_config": {"num_heads": 4, "head_dim": 16, "kda_layers": [1, 3]},
        "model_max_length": 1000, "num_experts": 2, "num_experts_per_token": 1,
    },
    "kimi_vl": {"text_config": {**COMMON, **ROUTED, **LATENT}},
    "laguna": {
        **HEADS, "sliding_window": 4, "num_experts": 4, "num_experts_per_tok": 2, "partial_rotary_factor": 0.5,
        "shared_expert_intermediate_size": 32, "moe_routed_scaling_factor": 2.5,
        "moe_router_score_func": "sqrtsoftplus", "layer_types": ["full_attention", *["sliding_attention"] * 3],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_attention_heads_per_layer": [4] * 4,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0},
        },
    },
    "lfm2": SHORT_CONV,
    "lfm2-vl": {"text_config": {**COMMON, **SHORT_CONV, "model_type": "lfm2"}},
    "lfm2_moe": {**SHORT_CONV, **EXPERTS},
    "lille-130m": {"block_size": 128, "n_layer": 2, "n_head": 4, "n_kv_heads": 4, "n_embd": 96},
    "llama": {},
    "llama:sliding": {"sliding_window": 8, "layer_types": SLIDING},
    "llama4": {"text_config": LLAMA4},
    "llama4_text": {"head_dim": 8, "intermediate_size_mlp": 64, "no_rope_layers": [0, 0, 1, 1], "use_qk_norm": True},
    "longcat_flash": LONGCAT,
    "mamba": {
        "use_bias": False, "use_conv_bias": True, "conv_kernel": 4, "state_size": 8, "time_step_rank": 4,
    },
    "mamba2": {
        "num_heads": 8, "head_dim": 8, "state_size": 16, "conv_kernel": 3, "n_groups": 2, "use_bias": False,
        "use_conv_bias": True, "time_step_limit": (0.01, 10.0), "time_step_rank": "auto",
    },
    "mellum": {
        **HEADS, **EXPERTS, "sliding_window": 8, "layer_types": SLIDING,
        "rope_parameters": {"full_attention": DEFAULT_ROPE, "sliding_attention": DEFAULT_ROPE},
    },
    "mimo": {},
    "mimo_v2_flash": {
        **ROUTED, "hybrid_layer_pattern": [0, 1, 0, 1], "moe_layer_freq": [0, 1, 0, 1], "n_group": 1,
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "sliding_window_size": 8,
        "layernorm_epsilon": 1e-5, "swa_rope_theta": 1000.0, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "head_dim": 16, "v_head_dim": 8, "swa_head_dim": 16, "swa_v_head_dim": 8,
        "partial_rotary_factor": 0.5,
    },
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.0, "scale_emb": 1.0},
    "minicpm3": {**LATENT, "rope_scaling": LONGROPE, "dim_model_base": 32, "scale_depth": 1.0, "scale_emb": 1.0},
    "minimax_m3_vl": {"text_config": {
        **COMMON, **HEADS, "dense_intermediate_size": 64, "shared_intermediate_size": 32, "num_local_experts": 4,
        "num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"] * 2, "layer_types":
        ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4,
        "index_topk_blocks": 2,
    }},
    "minimax": {
        **HEADS, "num_experts_per_tok": 2, "num_local_experts": 4, "shared_intermediate_size": 32, "rotary_dim": 8,
    },
    "ministral3": {
        "sliding_window": 8, "layer_types": SLIDING,
        "rope_parameters": {**DEFAULT_ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16},
    },
    "mistral3": {"text_config": {**COMMON, "model_type": "llama"}},
    "mistral4": {**ROUTED, **LATENT, "rope_parameters": {**DEFAULT_ROPE, "llama_4_scaling_beta": 0.1,
                                                         "original_max_position_embeddings": 16}},
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 4},
    "muse_glimmer": {**HEADS, "sliding_window": 8, "layer_types": SLIDING},
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "hidden_size": 64,
        "block_configs": [{
            "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
            "ffn": {"ffn_mult": 1.0, "no_op": False, "replace_with_linear": False},
        }] * 2, "num_hidden_layers": 2,
    },
    "nemotron_h": {**MAMBA2, **HEADS, "hybrid_override_pattern": ["M", "*", "M", "-"]},
    "olmo2": {},
    "olmo3": {**HEADS, "sliding_window": 8, "layer_types": SLIDING},
    "olmo_hybrid": {
        **GATED_DELTA, "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "olmoe": {**EXPERTS},
    "openelm": {
        "ffn_dim_divisor": 16, "ffn_multipliers": [1.0, 2.0], "head_dim": 16, "model_dim": 32,
        "normalize_qk_projections": True, "num_kv_heads": [1, 2], "num_query_heads": [2, 4],
        "num_transformer_layers": 2,
    },
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "phi3": {},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": LONGROPE},
    "pixtral": {"text_config": {**COMMON, "model_type": "llama"}},
    "plamo": {"num_attention_heads": 8},
    "plamo2": {
        "hidden_size_per_head": 16, "mamba_step": 2, "mamba_d_conv": 3, "mamba_d_state": 8, "mamba_num_heads": 4,
        "mamba_enabled": True, "full_attention_idx": None, "sliding_window": 2048, "attention_window_size": 2048,
    },
    "qwen": {"no_bias": True, "kv_channels": 8},
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen2_vl": {"text_config": {**COMMON, "model_type": "qwen2"}},
    "qwen3": {**HEADS},
    "qwen3_5": {**GATED_DELTA},
    "qwen3_5_moe": {**GATED_DELTA, **EXPERTS},
    "qwen3_moe": {**HEADS, **EXPERTS},
    "qwen3_next": {**GATED_DELTA, **EXPERTS},
    "qwen3_vl": {"text_config": {**COMMON, **HEADS, "model_type": "qwen3"}},
    "qwen3_vl_moe": {"text_config": {**COMMON, **HEADS, **EXPERTS, "model_type": "qwen3_moe"}},
    "recurrent_gemma": {
        "conv1d_width": 3, "logits_soft_cap": 30.0, "attention_window_size": 8, "num_key_value_heads": 1,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {
        "head_dim": 16, "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8,
    },
    "seed_oss": {**HEADS},
    "smollm3": {},
    "solar_open": {**ROUTED, **HEADS, "partial_rotary_factor": 1.0},
    "spark2_5": {
        **HEADS, "sliding_window": 8, "layer_types": SLIDING,
        "rope_parameters": {"full_attention": DEFAULT_ROPE, "sliding_attention": DEFAULT_ROPE},
    },
    "stablelm": {"partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "starcoder2": {"norm_epsilon": 1e-5},
    "step3p5": {
        **HEADS, "num_attention_groups": 2, "rope_theta": [1000.0] * 4, "sliding_window": 8, "layer_types": SLIDING,
        "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0],
        "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2},
        "use_head_wise_attn_gate": True, "moe_num_experts": 4, "moe_top_k": 2, "share_expert_dim": 32,
        "moe_layers_enum": "1,2,3",
    },
    "telechat3": {},
    "youtu_llm": {**LATENT},
}  # fmt: skip

SCALED: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 3.0},
    "cohere2": {"logit_scale": 3.0},
    "falcon_h1": {"tie_word_embeddings": True, "lm_head_multiplier": 6.0, "embedding_multiplier": 2.0},
    "gear": {"final_logit_softcapping": 1.5},
    "gemma2": {"final_logit_softcapping": 1.5},
    "gemma3n": {"text_config": {**GEMMA3N, "final_logit_softcapping": 1.5}},
    "gemma4": {"text_config": {**GEMMA4, "final_logit_softcapping": 1.5}},
    "gemma4_text": {"final_logit_softcapping": 1.5},
    "granite": {"logits_scaling": 0.3},
    "granitemoe": {"logits_scaling": 0.3},
    "granitemoehybrid": {"logits_scaling": 0.3},
    "minicpm": {"dim_model_base": 8},
    "minicpm3": {"dim_model_base": 8},
    "muse_glimmer": {"output_multiplier": 4.0, "final_logit_softcapping": 3.0},
    "recurrent_gemma": {"logits_soft_cap": 1.5},
}
"""Settings that change what a model does to its logits after the final norm, far from neutral."""

WINDOWS = frozenset({"attention_chunk_size", "attention_window_size", "loop_window_size", "sliding_window"})


def tiny_model(name: str, window: int | None = None, **changes: Any) -> nn.Module:
    """Return a model of mlx-lm's module `name`, or of its variant `name:variant`, with mlx-lm's own weights.

    window: length of its windows and chunks; changes: fields of its configuration to change.
    """
    arch = importlib.import_module(f"mlx_lm.models.{name.split(':')[0]}")
    config = {"model_type": name, **COMMON, **CONFIGS[name], **changes}
    return arch.Model(arch.ModelArgs.from_dict(config if window is None else _seeing(config, window)))


def _seeing(config: dict[str, Any], window: int) -> dict[str, Any]:
    """Return the configuration with windows and chunks of another length."""
    inner = {key: _seeing(value, window) for key, value in config.items() if isinstance(value, dict)}
    return {**config, **inner, **{key: window for key in config if key in WINDOWS}}


def sicken(model: nn.Module, token: int) -> None:
    """Make a model read a token as NaN. If it uses its embedding for logits too, all its logits are NaN."""
    for part in model.modules():
        if isinstance(part, nn.Embedding) and part.weight.shape[0] == VOCAB:
            part.weight[token] = mx.nan
