"""The layout of vllm-project/speculators for EAGLE-3 heads, with a separate config for the layer.

Missing fields of `transformer_layer_config` have the defaults of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import mlx.core as mx

from eagle_mlx.errors import CheckpointError, ConfigError
from eagle_mlx.formats import fields
from eagle_mlx.formats.tensors import SaveOptions, read_weights, save_head, with_embedding, without_copy
from eagle_mlx.heads.base import build, vocabulary_tensors
from eagle_mlx.heads.eagle3.head import Eagle3Config, Eagle3Head, PEagleConfig
from eagle_mlx.heads.eagle3.portable import aux_layers_of, build_peagle, inner_tensors, outer_name, take_mask_token
from eagle_mlx.heads.kinds import check_expressible
from eagle_mlx.heads.layers import layer_json

LAYER_DEFAULTS: dict[str, dict[str, Any]] = {
    name: {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, **others}
    for name, others in {
        "llama": {"intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048},
        "qwen3": {
            **{"intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768},
            **{"num_key_value_heads": 32, "head_dim": 128},
        },
    }.items()
}
"""The defaults of transformers for the fields of a layer, which its files may leave out."""
NOT_READ = ("verifier_norm.weight", "verifier_lm_head.weight")
"""Copies of the target's weights, needed only for training."""
_FIELDS = (
    *("draft_vocab_size", "target_hidden_size"),
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
)
"""The fields that are written as they are."""


def load_speculators(folder: Path, target_layers: int | None = None) -> Eagle3Head:
    """Read an EAGLE-3 or P-EAGLE head (`Format.load`)."""
    file, config = folder / "config.json", fields.read_config(folder)
    kind = config.get("speculators_model_type")
    if kind not in ("eagle3", "peagle"):
        raise CheckpointError(f"{file} has speculators_model_type {kind}; it must be eagle3")
    tensors = without_copy(config, inner_tensors(folder, read_weights(folder)))
    tensors = {name: value for name, value in tensors.items() if name not in NOT_READ}
    if kind == "eagle3":
        return build(folder, Eagle3Head, _from_json(file, config, tensors, target_layers), tensors, outer_name)
    mask = take_mask_token(file, config)
    return build_peagle(folder, _from_json(file, config, tensors, target_layers), tensors, mask)


def _from_json(
    file: Path, config: Mapping[str, Any], tensors: Mapping[str, mx.array], target_layers: int | None
) -> Eagle3Config:
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise CheckpointError(f"{file} lacks transformer_layer_config")
    kind = layer.get("model_type", "qwen3")
    if not isinstance(kind, str) or kind not in LAYER_DEFAULTS:
        raise CheckpointError(f"{file} has a layer of type {kind}; only llama and qwen3 layers can be read")
    fields.refuse(file, {**layer, "tie_word_embeddings": False})  # this field is about the verifier
    fields.warn_of_unknown(file, {**layer, **config})
    fields.refuse(file, {name: value for name, value in config.items() if name != "tie_word_embeddings"})
    with fields.reading(file):
        shape = fields.layer_fields({**LAYER_DEFAULTS[kind], **_one_rope(layer)})
        size = shape["hidden_size"]
        if config.get("target_hidden_size") not in (None, size):
            raise ConfigError(f"target_hidden_size is {config['target_hidden_size']} but the head's own is {size}")
        return Eagle3Config(
            **shape,
            draft_vocab_size=int(config.get("draft_vocab_size") or 32000),
            target_hidden_size=size,
            aux_layers=aux_layers_of(file, None, config.get(fields.LAYER_IDS), target_layers),
            norm_before_residual=bool(config.get("norm_before_residual", True)),
            norm_before_fc=bool(config.get("norm_before_fc", False)),
            fc_norm=bool(config.get("fc_norm", False)),
            norm_output=bool(config.get("norm_output", False)),
            qk_norm=kind == "qwen3",
            own_embedding="embed_tokens.weight" in tensors,
        )


def _one_rope(layer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Use the parameters of sliding layers if they differ by type of layer, as speculators does."""
    by_type = layer.get("rope_parameters")
    if isinstance(by_type, dict) and "sliding_attention" in by_type:
        return {**layer, "rope_parameters": by_type["sliding_attention"]}
    return layer


def save_speculators(
    head: Eagle3Head,
    folder: str | Path,
    *,
    base_model: str | None = None,
    target_architectures: Sequence[str] = (),
    depth: int = 3,
    **options: Unpack[SaveOptions],
) -> None:
    """Write a head (`Format.save`) with an embedding, its own or its target's: without one, speculators would draft
    with uninitialized memory.

    `base_model` is the target for other servers, a hub id or local folder. Without it, speculators loads no head; it
    reads embedding and projection there, which must not be quantized by MLX. `depth` is the number of tokens that a
    server should draft. Raises HeadError if there is neither an embedding nor a target.
    """
    config = head.config
    _check_expressible(config)
    weights, noted = with_embedding(head)
    mask = {"mask_token_id": config.mask_token_id} if isinstance(config, PEagleConfig) else {}
    written = {
        "architectures": ["PEagleSpeculator" if mask else "Eagle3Speculator"],
        **fields.speculators_json("peagle" if mask else "eagle3", base_model, target_architectures, depth),
        **mask,
        **{name: getattr(config, name) for name in _FIELDS},
        "embed_requires_grad": False,
        fields.LAYER_IDS: [k + 1 for k in config.aux_layers],
        "transformer_layer_config": _layer_json(config),
    }
    tensors = {outer_name(name).replace("midlayer.", "layers.0."): value for name, value in weights.items()}
    save_head(folder, written, tensors | vocabulary_tensors(head), noted, **options)


def _check_expressible(config: Eagle3Config) -> None:
    fields.window_json(config.windows)
    fixed = ("norm_logits", "input_layernorm", "hidden_norm", "use_aux_hidden_state", "qkv_bias", "quantization")
    usual = {name: getattr(Eagle3Config, name) for name in fixed}
    check_expressible(config, "the speculators", "write the portable layout", **usual)
    if config.hidden_size != config.target_hidden_size:
        raise ConfigError(
            f"speculators needs heads of their target's width, {config.target_hidden_size}, not {config.hidden_size}; "
            "write the portable layout"
        )
    if config.qk_norm and config.mlp_bias:
        raise ConfigError("speculators has no layer with both q/k norms and mlp_bias; write the portable layout")


def _layer_json(config: Eagle3Config) -> dict[str, Any]:
    if not config.qk_norm:
        return {"model_type": "llama", **layer_json(config), "mlp_bias": config.mlp_bias}
    sliding = {"use_sliding_window": True, "max_window_layers": 0} if config.windows else {}
    return {"model_type": "qwen3", **layer_json(config), **sliding}


def holds_speculators(config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> bool:
    """Return whether the files are an EAGLE-3 head in speculators' format. Loading an unknown type raises an error."""
    return config.get("speculators_model_type") not in (None, "mtp", "dflash", "dspark", "peagle")
