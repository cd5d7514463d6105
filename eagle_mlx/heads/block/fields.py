"""Read and write the config fields that all layouts of block drafters share, and refuse unsupported fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from eagle_mlx.errors import CheckpointError, ConfigError
from eagle_mlx.formats.fields import (
    layer_fields,
    quantization_json,
    read_quantization,
    refuse,
    unknown_fields,
    warn_of_unknown,
)
from eagle_mlx.formats.tensors import read_weights
from eagle_mlx.heads.block.config import BlockConfig
from eagle_mlx.heads.kinds import check_expressible
from eagle_mlx.heads.layers import layer_json

DFLASH = "dflash_config"
"""The object in which z-lab and SpecForge keep the fields of block drafters."""
SHARED = (
    *("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "rope_is_neox_style", "is_neox_style"),
)
"""Fields of every block drafter."""
DSPARK = (
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor"),
)
TRAINING = (
    *("num_anchors", "confidence_head_alpha", "attention_mode", "loss_decay_gamma", "ce_loss_alpha", "l1_loss_alpha"),
    *("selector_loss_weight", "attn_implementation"),
    *("block_size_policy", "dflash_initial_block_size", "runtime_block_size"),
)
"""Fields that trainers and servers write, without effect on drafts."""
_UNIMPLEMENTED = (
    *("attention_sink_bias", "use_swa", "swa_window_size", "dflash_query_causal", "dspark_bonus_anchor"),
    *("enable_moe_block", "hidden_size_per_layer_input", "use_double_wide_mlp"),
)
"""Fields that change the network, and that are refused even where other unknown fields are not."""


def one_of(config: Mapping[str, Any], name: str, otherwise: Any = None, required: bool = False) -> Any:
    """Return a field of `dflash_config`, else of the top level, else `otherwise`. Raises KeyError if it is required."""
    for place in (config.get(DFLASH) or {}, config):
        if place.get(name) is not None:
            return place[name]
    if required:
        raise KeyError(name)
    return otherwise


def check_fields(
    file: Path, config: Mapping[str, Any], known: Iterable[str], nested: Iterable[str] = (), strict: bool = True
) -> None:
    """Raise CheckpointError with the names of fields that are not known, or have a value that is not implemented.

    `known` are fields of the top level besides those of decoder layers, `nested` those of `dflash_config`. If not
    `strict`, unknown fields of the top level only give a HeadWarning: some trainers copy the target's config.
    """
    inner = config.get(DFLASH) or {}
    if not isinstance(inner, dict):
        raise CheckpointError(f"{file}: {DFLASH} must be an object, not {inner!r}")
    own = {*known, DFLASH, "is_causal", "tie_word_embeddings"}
    refuse(file, {name: value for name, value in config.items() if name not in own})
    others = {name: value for name, value in config.items() if name not in own}
    if not strict:
        warn_of_unknown(file, {name: value for name, value in others.items() if name not in _UNIMPLEMENTED})
    unknown = [name for name in unknown_fields(others) if strict or name in _UNIMPLEMENTED]
    allowed = set(nested)
    unknown += [f"{DFLASH}.{name}" for name, value in sorted(inner.items()) if name not in allowed and is_set(value)]
    if unknown:
        raise CheckpointError(
            f"{file} sets {', '.join(unknown)}, which block drafters here do not support; their effect would be missing"
        )


def is_set(value: Any) -> bool:
    return value not in (None, False, "", [], {})


def shared_fields(config: Mapping[str, Any], target_layers: int | None) -> dict[str, Any]:
    """Return the fields of the decoder layers, of the block and of the context. Raises KeyError, ConfigError."""
    fields = layer_fields({**config, "layer_types": layer_types(config)})
    return {
        **fields,
        "draft_vocab_size": fields["vocab_size"],
        "aux_layers": _aux_layers(config, fields["num_hidden_layers"], target_layers),
        "block_size": int(one_of(config, "block_size", required=True)),
        "mask_token_id": int(one_of(config, "mask_token_id", required=True)),
        "interleaved_rope": not one_of(config, "rope_is_neox_style", one_of(config, "is_neox_style", True)),
        "quantization": read_quantization(config),
    }


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """Return the layers' types; by default Qwen3's: sliding from `max_window_layers` on, if enabled."""
    if config.get("layer_types"):
        return list(config["layer_types"])
    first, slides = config.get("max_window_layers"), bool(config.get("use_sliding_window"))
    first = 28 if first is None else int(first)
    count = int(config["num_hidden_layers"])
    return ["sliding_attention" if slides and layer >= first else "full_attention" for layer in range(count)]


def _aux_layers(config: Mapping[str, Any], layers: int, target_layers: int | None) -> tuple[int, ...]:
    ids = one_of(config, "target_layer_ids")
    if ids:
        if any(k < 0 for k in ids):
            raise ConfigError(f"target_layer_ids {list(ids)} name the embedding's output, which cannot be read")
        return tuple(map(int, ids))
    count = one_of(config, "num_target_layers", target_layers)
    if count is None:
        raise ConfigError("target_layer_ids is missing; load the head with its target")
    return default_aux_layers(int(count), layers)


def default_aux_layers(target_layers: int, layers: int) -> tuple[int, ...]:
    """Return the target layers that z-lab's heads with this many layers read by default, counted from 0."""
    if layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers))


def dspark_fields(config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> dict[str, Any]:
    """Return the fields of the Markov head and of the confidence head. Missing ones follow from the tensors."""
    w1, proj = tensors.get("markov_head.markov_w1.weight"), tensors.get("confidence_head.proj.weight")
    rank = int(one_of(config, "markov_rank", 0 if w1 is None else w1.shape[-1]))
    kind = str(one_of(config, "markov_head_type", "vanilla")).lower()
    if rank and kind not in ("vanilla", "gated", "rnn"):
        raise ConfigError(f"markov_head_type is {kind}; it must be vanilla, gated or rnn")
    confident = bool(one_of(config, "enable_confidence_head", proj is not None))
    reads_token = one_of(config, "confidence_head_with_markov", rank > 0)
    return {
        "markov_rank": rank,
        "markov_head": kind if rank else None,
        "confidence_head": confident,
        "confidence_with_markov": bool(reads_token) if confident else True,
    }


def read_block_weights(folder: Path, left_out: Sequence[str] = ()) -> dict[str, mx.array]:
    """Return the tensors without the prefix `model.`, and without those in `left_out`. Raises CheckpointError."""
    if (folder / "mask_embedding.pt").exists():
        raise CheckpointError(f"{folder} has a mask_embedding.pt; a separate mask embedding is not supported")
    tensors: dict[str, mx.array] = {}
    for name, value in read_weights(folder).items():
        short = name.removeprefix("model.")
        if short in tensors:
            raise CheckpointError(f"{folder} holds {short} twice, once as {name}; keep one of them")
        if short not in left_out:
            tensors[short] = value
    return tensors


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
        **quantization_json(config.quantization),
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


def own_ends(tensors: Mapping[str, mx.array]) -> dict[str, Any]:
    """Return whether the files hold an embedding and an output projection."""
    return {"own_embedding": "embed_tokens.weight" in tensors, "own_lm_head": "lm_head.weight" in tensors}
