"""Read and write the config fields that all layouts of block drafters share, and refuse unsupported fields."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_mlx.errors import CheckpointError, ConfigError, HeadWarning, check
from eagle_mlx.formats import fields
from eagle_mlx.formats.tensors import HeadFolder, Tensors
from eagle_mlx.heads.base import check_expressible
from eagle_mlx.heads.block.layers import MARKOV_HEADS, BlockConfig
from eagle_mlx.heads.layers import layer_json

DFLASH = "dflash_config"  # the object in which z-lab and SpecForge keep the fields of block drafters
_CONTEXT = ("target_layer_ids", "num_target_layers", "rope_is_neox_style", "is_neox_style")
SHARED = ("block_size", "mask_token_id", *_CONTEXT)  # fields of every block drafter
_CONFIDENCE = ("enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor")
DSPARK = ("markov_rank", "markov_head_type", *_CONFIDENCE)
_GEMMA_ACTIVATION = "gelu_pytorch_tanh"
_UNIMPLEMENTED = (
    *("attention_sink_bias", "use_swa", "swa_window_size", "causal", "dflash_query_causal", "dspark_bonus_anchor"),
    *("enable_moe_block", "hidden_size_per_layer_input", "use_double_wide_mlp"),
)
"""Fields that change the network, and that are refused even where other unknown fields are not."""


def flat_config(file: Path, config: Mapping[str, Any], own: Sequence[str], strict: bool = True) -> dict[str, Any]:
    """Return the fields that are set, with those of `dflash_config` at the top level, where they take precedence.

    `own`: the layout's fields besides those of decoder layers. Raises CheckpointError for others, and for values that
    are not implemented. If not `strict`, unknown fields only give a HeadWarning unless they are in `_UNIMPLEMENTED`.
    """
    inner = config.get(DFLASH) or {}
    if not isinstance(inner, dict):
        raise CheckpointError(f"{file}: {DFLASH} must be an object, not {inner!r}")
    given = {**config, **{name: value for name, value in inner.items() if value is not None}}
    given = {name: value for name, value in given.items() if value is not None and name != DFLASH}
    others = {name: value for name, value in given.items() if name not in (*own, "is_causal", "tie_word_embeddings")}
    fields.refuse(file, others)
    if unknown := [name for name in fields.unknown_fields(others) if strict or name in _UNIMPLEMENTED]:
        raise CheckpointError(
            f"{file} sets {', '.join(unknown)}, which block drafters here do not support; their effect would be missing"
        )
    fields.warn_of_unknown(file, others)
    return given


def shared_fields(config: Mapping[str, Any], target_layers: int | None) -> dict[str, Any]:
    """Return the fields of the decoder layers, of the block and of the context. Raises KeyError, ConfigError."""
    layer = fields.layer_fields({**config, "layer_types": layer_types(config)})
    return {
        **layer,
        "draft_vocab_size": layer["vocab_size"],
        "aux_layers": _aux_layers(config, layer["num_hidden_layers"], target_layers),
        "block_size": int(config["block_size"]),
        "mask_token_id": int(config["mask_token_id"]),
        "interleaved_rope": not config.get("rope_is_neox_style", config.get("is_neox_style", True)),
        "quantization": fields.read_quantization(config),
    }


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """Return the layers' types; by default Qwen3's: sliding from `max_window_layers` on, if enabled."""
    if config.get("layer_types"):
        return list(config["layer_types"])
    count, first = int(config["num_hidden_layers"]), int(config.get("max_window_layers", 28))
    full = min(first, count) if config.get("use_sliding_window") else count
    return ["full_attention"] * full + ["sliding_attention"] * (count - full)


def _aux_layers(config: Mapping[str, Any], layers: int, target_layers: int | None) -> tuple[int, ...]:
    if ids := config.get("target_layer_ids"):
        check(min(ids) >= 0, f"target_layer_ids {list(ids)} name the embedding's output, which cannot be read")
        return tuple(map(int, ids))
    count = config.get("num_target_layers", target_layers)
    if count is None:
        raise ConfigError("target_layer_ids is missing; load the head with its target")
    guessed = default_aux_layers(int(count), layers)
    warnings.warn(
        f"the head's config.json lacks target_layer_ids, so it reads z-lab's default layers, "
        f"{', '.join(map(str, guessed))}; if it was trained with others, it drafts badly: add them to the file",
        HeadWarning,
        stacklevel=2,
    )
    return guessed


def default_aux_layers(target_layers: int, layers: int) -> tuple[int, ...]:
    """Return the target layers that z-lab's heads with this many layers read by default, counted from 0."""
    if layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers))


def dspark_fields(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Return the fields of the Markov head and of the confidence head. Missing ones follow from the tensors."""
    w1, proj = tensors.get("markov_head.markov_w1.weight"), tensors.get("confidence_head.proj.weight")
    rank = int(config.get("markov_rank", 0 if w1 is None else w1.shape[-1]))
    kind = str(config.get("markov_head_type", "vanilla")).lower()
    check(not rank or kind in MARKOV_HEADS, f"markov_head_type is {kind}; it must be vanilla, gated or rnn")
    confident = bool(config.get("enable_confidence_head", proj is not None))
    reads_token = config.get("confidence_head_with_markov", rank > 0)
    return {
        "markov_rank": rank,
        "markov_head": kind if rank else None,
        "confidence_head": confident,
        "confidence_with_markov": bool(reads_token) if confident else True,
    }


def block_tensors(files: HeadFolder) -> Tensors:
    """Return the tensors, without copies of the target's. Raises CheckpointError for a separate mask embedding."""
    if (files.folder / "mask_embedding.pt").exists():
        raise CheckpointError(f"{files.folder} has a mask_embedding.pt; a separate mask embedding is not supported")
    return {name: value for name, value in files.tensors.items() if name not in fields.NOT_READ}


def block_layer_json(config: BlockConfig) -> dict[str, Any]:
    """Return the fields of the decoder layers, as transformers writes them for Qwen3."""
    windows = config.windows or (None,) * config.num_hidden_layers
    return {
        "model_type": "qwen3",
        **layer_json(config),
        "rope_theta": config.rope_theta,
        "use_sliding_window": bool(config.windows),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        **({"rope_is_neox_style": False} if config.interleaved_rope else {}),
    }


def check_block_expressible(config: BlockConfig, whose: str, **wanted: Any) -> None:
    """Raise ConfigError if a layout cannot express a field: those in `wanted` must have the given value."""
    plain = {"qkv_bias": False, "mlp_bias": False, "qk_norm": True, "gemma": False, "conv_kernel_size": 0}
    check_expressible(config, whose, "choose another layout", **{**plain, **wanted})


def causal_by_type(windows: Sequence[int | None], layers: int) -> tuple[bool, ...]:
    """Return the default: layers with a window are causal within the block, others are not."""
    return all_or_none(tuple(window is not None for window in windows or (None,) * layers))


def all_or_none(causal: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return (), as configs have it, if no layer is causal."""
    return causal if any(causal) else ()


def dspark_json(config: BlockConfig) -> dict[str, Any]:
    """Return the fields that `dspark_fields` reads, and which slot drafts first."""
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head or "vanilla",
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_head and config.confidence_with_markov,
        "sample_from_anchor": config.first_slot_drafts,
    }


def own_ends(tensors: Tensors) -> dict[str, Any]:
    """Return whether the files hold an embedding and an output projection."""
    return {"own_embedding": "embed_tokens.weight" in tensors, "own_lm_head": "lm_head.weight" in tensors}


def as_qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Gemma config with the names of Qwen3's fields, without RoPE's. Raises ConfigError, KeyError."""
    kv_heads = config["num_global_key_value_heads" if config.get("attention_k_eq_v") else "num_key_value_heads"]
    activation = config.get("hidden_activation")
    is_known = activation == _GEMMA_ACTIVATION
    check(is_known, f"hidden_activation is {activation!r}; only {_GEMMA_ACTIVATION} is supported")
    left_out = ("rope_parameters", "rope_scaling", "hidden_activation", "partial_rotary_factor")
    kept = {name: value for name, value in config.items() if name not in left_out}
    return {**kept, "head_dim": config["global_head_dim"], "num_key_value_heads": kv_heads}


def gemma_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a BlockConfig that only Gemma's heads have. Raises ConfigError, KeyError."""
    rope = dict((config.get("rope_parameters") or {})["full_attention"])
    theta, kind = float(rope.pop("rope_theta")), rope.pop("rope_type", "default")
    is_known = kind in ("default", "proportional") and rope.keys() <= {"partial_rotary_factor", "factor"}
    check(is_known, f"RoPE of type {kind} with {', '.join(rope) or 'no factor'} is not supported in Gemma's heads")
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
        "hidden_activation": _GEMMA_ACTIVATION,
        "attention_k_eq_v": config.key_is_value,
        "global_head_dim": config.head_dim,
        "num_global_key_value_heads": config.num_key_value_heads,
        "rope_parameters": {"full_attention": rope},
        "final_logit_softcapping": config.logit_softcap,
    }
