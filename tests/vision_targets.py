"""Tiny vision-language models with random weights, in folders that mlx-lm and mlx-vlm both load, and images."""

from __future__ import annotations

import importlib
import json
from base64 import b64encode
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from eagle_mlx.target import Target, load_target
from tests.fakes import plain_tokenizer, randomize

VOCAB = 4112  # the embedded tokenizer's 4,096 tokens and special ones
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% if message['tool_calls'] is defined %}{{ message['tool_calls'] | tojson }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXT: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16},
    **{"num_key_value_heads": 2, "vocab_size": VOCAB, "rms_norm_eps": 1e-6, "max_position_embeddings": 1024},
    **{"rope_theta": 10000.0, "tie_word_embeddings": False},
}
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 2}
PIXTRAL = {**VISION, "model_type": "pixtral", "head_dim": 16, "patch_size": 8, "image_size": 64, "rope_theta": 10000.0}
_IMG = {"image_token_index": 4096, "vision_feature_layer": -1}
_QWEN_VISION = {
    **{"hidden_size": 32, "depth": 3, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "patch_size": 8},
    **{"num_position_embeddings": 64, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3},
}
_QWEN_IDS = {
    **{"image_token_id": 4096, "video_token_id": 4099, "vision_start_token_id": 4097, "vision_end_token_id": 4098},
    "tie_word_embeddings": False,
}
_GATED = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 8},
    **{"linear_conv_kernel_dim": 3, "full_attention_interval": 2, "num_key_value_heads": 2},
    "rope_parameters": {
        **{"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
}
_EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    **{"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": []},
}
_ROPE = {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        **_QWEN_IDS,
        "text_config": {**TEXT, **_ROPE, "model_type": "qwen3_vl_text"},
        "vision_config": {**_QWEN_VISION, "model_type": "qwen3_vl", "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_vl_moe": {
        **_QWEN_IDS,
        "text_config": {**TEXT, **_ROPE, **_EXPERTS, "model_type": "qwen3_vl_moe_text"},
        "vision_config": {**_QWEN_VISION, "model_type": "qwen3_vl_moe", "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_5": {
        **_QWEN_IDS,
        "text_config": {**TEXT, **_GATED, "model_type": "qwen3_5_text"},
        "vision_config": {**_QWEN_VISION, "model_type": "qwen3_5", "deepstack_visual_indexes": []},
    },
    "qwen3_5_moe": {
        **_QWEN_IDS,
        "text_config": {**TEXT, **_GATED, **_EXPERTS, "model_type": "qwen3_5_moe_text"},
        "vision_config": {**_QWEN_VISION, "model_type": "qwen3_5_moe", "deepstack_visual_indexes": []},
    },
    "mistral3": {
        **_IMG,
        **{"spatial_merge_size": 2, "multimodal_projector_bias": False, "projector_hidden_act": "gelu"},
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": PIXTRAL,
    },
    "pixtral": {
        **_IMG,
        "vision_feature_select_strategy": "full",
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": PIXTRAL,
    },
    "gemma4": {
        **{"image_token_id": 4096, "boi_token_id": 4097, "eoi_token_id": 4098, "audio_token_id": 4110},
        **{"vocab_size": VOCAB, "audio_config": None, "vision_soft_tokens_per_image": 70},
        "text_config": {
            **{**TEXT, "model_type": "gemma4_text", "num_hidden_layers": 6, "num_key_value_heads": 1},
            **{"global_head_dim": 32, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
            **{"num_kv_shared_layers": 2, "sliding_window": 24, "sliding_window_pattern": 2},
            **{"layer_types": ["sliding_attention", "full_attention"] * 3, "tie_word_embeddings": True},
            **{"use_bidirectional_attention": "vision", "final_logit_softcapping": 30.0, "use_double_wide_mlp": False},
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
        },
        "vision_config": {
            **{
                **VISION,
                "model_type": "gemma4_vision",
                "num_key_value_heads": 2,
                "head_dim": 16,
                "global_head_dim": 16,
            },
            **{"patch_size": 8, "pooling_kernel_size": 2, "default_output_length": 70, "position_embedding_size": 64},
        },
    },
    "gemma3": {
        **{"image_token_index": 4096, "mm_tokens_per_image": 16, "hidden_size": 32, "vocab_size": VOCAB},
        "text_config": {
            **{**TEXT, "model_type": "gemma3_text", "sliding_window": 24, "sliding_window_pattern": 2},
            **{"query_pre_attn_scalar": 16, "mm_tokens_per_image": 16, "rope_theta": 1e6},
        },
        "vision_config": {**VISION, "model_type": "siglip_vision_model", "patch_size": 8, "image_size": 64},
    },
}
_PIXTRAL_PROCESSOR = {
    **{"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64}},
    "patch_size": {"height": 8, "width": 8},
}
_QWEN = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_QWEN_PROCESSOR = {
    **{"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 8, "merge_size": 2, "temporal_patch_size": 2},
    **{"size": {"shortest_edge": 256, "longest_edge": 4096}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
}
PROCESSORS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_QWEN, _QWEN_PROCESSOR),
    "mistral3": _PIXTRAL_PROCESSOR,
    "pixtral": _PIXTRAL_PROCESSOR,
    "gemma4": {},
    "gemma3": {
        **{"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 64, "width": 64}, "resample": 2},
        **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_resize": True, "do_pan_and_scan": None},
    },
}
MORE: dict[str, dict[str, Any]] = {
    **{kind: {"processor_class": "Qwen3VLProcessor"} for kind in _QWEN},
    "mistral3": {"processor_class": "PixtralProcessor", "patch_size": 8, "spatial_merge_size": 2},
    "pixtral": {"processor_class": "PixtralProcessor", "patch_size": 8, "spatial_merge_size": 1},
    "gemma4": {
        "processor_class": "Gemma4Processor",
        "image_processor": {"patch_size": 8, "max_soft_tokens": 70, "pooling_kernel_size": 2},
    },
    "gemma3": {"processor_class": "Gemma3Processor", "image_seq_length": 16},
}
_MISTRAL_TOKENS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
_GEMMA_TOKENS = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
_QWEN_TOKENS = {
    **{"image_token": "<|image_pad|>", "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"},
    "video_token": "<|video_pad|>",
}
TOKENS = {
    **dict.fromkeys(_QWEN, _QWEN_TOKENS),
    "mistral3": _MISTRAL_TOKENS,
    "pixtral": _MISTRAL_TOKENS,
    "gemma3": _GEMMA_TOKENS,
    "gemma4": {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
}


def vision_folder(folder: Path, kind: str, seed: int = 0) -> Path:
    """Write a random model of this type with the embedded tokenizer and a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": kind, "eos_token_id": 2, **CONFIGS[kind]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[kind]))
    (folder / "processor_config.json").write_text(json.dumps(MORE[kind]))
    tokenizer = plain_tokenizer(TEMPLATE)
    names = TOKENS[kind]
    tokenizer.add_special_tokens({"additional_special_tokens": list(names.values())})
    tokenizer.save_pretrained(folder)
    named = json.loads((file := folder / "tokenizer_config.json").read_text())
    file.write_text(json.dumps({**named, "extra_special_tokens": names}))
    module = importlib.import_module(f"mlx_vlm.models.{kind}")
    from mlx_vlm.utils import update_module_configs

    parts = module.ModelConfig.from_dict(config)
    model = module.Model(update_module_configs(parts, module, config, ["text", "vision"]))
    randomize(model, seed, 0.2)
    weights = {name: value.astype(mx.float32) for name, value in tree_flatten(model.parameters())}
    if kind == "gemma3":  # whose files tie both
        del weights["language_model.lm_head.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def vision_target(folder: Path, kind: str, seed: int = 0) -> Target:
    return load_target(vision_folder(folder, kind, seed))


@cache
def picture(seed: int = 0, width: int = 64, height: int = 64, form: str = "PNG") -> bytes:
    """Return the file of an image of noise in blocks of eight pixels."""
    from PIL import Image

    blocks = np.random.default_rng(seed).integers(0, 256, (-(-height // 8), -(-width // 8), 3), np.uint8)
    file = BytesIO()
    Image.fromarray(blocks.repeat(8, 0).repeat(8, 1)[:height, :width]).save(file, form)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"
