"""File layouts for MTP heads: this project's, that of vllm-project/speculators for Qwen's heads, and mlx-vlm's.

Ours has `enorm`, `hnorm`, `eh_proj`, `block.*` with mlx-lm's names, `norm` and, if the head has its own, `embed_tokens`
and `lm_head`. The fields of MTPConfig are under `eagle_mlx_mtp` in config.json.

mlx-vlm's `qwen3_5_mtp` is the MTP layer of a Qwen3.5 or Qwen3-Next in a folder of its own, often quantized. The tensors
have the published names without `mtp.`, mlx-lm's experts, and norms that multiply by their weights. The model's config
is under `text_config`; `block_size` only says how many tokens to draft. `fc` reads the embedding first, the target's
hidden state enters after its final norm, and the next step reads the output after the head's norm. Source: mlx-vlm
0.7.10, `speculative/drafters/mtp_split.py` and `qwen3_5_mtp` (tests/golden/make_split.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import mlx.core as mx

from eagle_mlx.errors import CheckpointError, ConfigError
from eagle_mlx.formats import fields
from eagle_mlx.formats.tensors import SaveOptions, in_file_type, read_weights, save_head, weights_of
from eagle_mlx.heads.base import build
from eagle_mlx.heads.kinds import Format, check_expressible, of_speculators
from eagle_mlx.heads.mtp.head import MTPConfig, MTPHead, layer_args
from eagle_mlx.heads.mtp.published import (
    MIMO,
    QWEN,
    ZERO_CENTRED,
    common_quantization,
    mtp_of_speculators,
    norms_of,
    split_layer,
)
from eagle_mlx.heads.precision import quantize

FIELD = "eagle_mlx_mtp"
ARCHITECTURE = "EagleMLXMTPHead"
KEEP = "keep this project's layout"
"""What to do with a head that another layout cannot express."""
_LAYERS = {"qwen3": ("qwen3",), "qwen3_next": ("qwen3_next",), "qwen3_5": ("qwen3_5_text", "qwen3_5_moe_text")}
"""Maps mlx-lm's module to speculators' layer types."""
MODEL_TYPE = "qwen3_5_mtp"
_READ = ("block_size", "tie_word_embeddings")
_NAMES = {ours: theirs for theirs, ours in QWEN.items()}


def save_mtp(head: MTPHead, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    """Write a head in this project's layout (`Format.save`)."""
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": head.config.model_type,
        "hidden_size": head.hidden_size,
        "vocab_size": head.vocab_size,
        FIELD: dataclasses.asdict(head.config),
        **fields.quantization_json(head.config.quantization),
    }
    save_head(folder, config, weights_of(head), **options)


def load_mtp(folder: Path, _: int | None = None) -> MTPHead:
    """Read a head in either layout (`Format.load`)."""
    written, tensors = fields.read_config(folder), read_weights(folder)
    if written.get("speculators_model_type") == "mtp":
        with fields.reading(folder / "config.json"):
            config, tensors = mtp_of_speculators(written, tensors)
    else:
        config = _from_json(folder, written)
    return build(folder, MTPHead, config, tensors)


def _from_json(folder: Path, written: Mapping[str, Any]) -> MTPConfig:
    file = folder / "config.json"
    values = written.get(FIELD)
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} has no {FIELD}, so it is not an MTP head of this project")
    unknown = sorted(values.keys() - {field.name for field in dataclasses.fields(MTPConfig)})
    if unknown:
        raise CheckpointError(f"{file} sets {FIELD}.{unknown[0]}, which is not known; update EAGLE-MLX")
    with fields.reading(file):
        return MTPConfig(**values)


def quantized(head: MTPHead, bits: int = 4, group_size: int = 64) -> MTPHead:
    """Quantize the head's large matrices in place, except expert routers, and return it.

    Raises ConfigError if the hidden size is not a multiple of the group size.
    """
    if head.hidden_size % group_size:
        raise ConfigError(f"a hidden size of {head.hidden_size} is not a multiple of the group size {group_size}")
    quantize(head, bits, group_size)
    return head


def save_speculators_mtp(
    head: MTPHead,
    folder: str | Path,
    *,
    base_model: str | None = None,
    target_architectures: Sequence[str] = (),
    depth: int = 3,
    **options: Unpack[SaveOptions],
) -> None:
    """Write a head for speculators (`Format.save`). `base_model` and `depth` are as in `save_speculators`.

    Norms that are published zero-centered are written that way, in float32 if `dtype` would lose a digit (a float32
    head may lose the last digit). The layout has no field for which hidden state is read, so it is stored under
    `eagle_mlx`.
    """
    config, dtype = head.config, options.get("dtype", mx.bfloat16)
    _check_expressible(config)
    zero_centred = config.model_type in ZERO_CENTRED
    weights = in_file_type(weights_of(head), dtype)
    within, around = norms_of(weights) if zero_centred else ([], [])
    exact = {name: _less_one(weights[name]) for name in within + around}
    written = {
        "architectures": ["MTPDraftModel"],
        **fields.speculators_json("mtp", base_model, target_architectures, depth),
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": {**config.layer, "model_type": _layer_type(config)},
    }
    noted = {"target_norm": config.target_norm, **({fields.NOTED: True} if zero_centred else {})}
    save_head(folder, written, _outer(weights), noted, _outer(exact), **options)


def _check_expressible(config: MTPConfig) -> None:
    if config.model_type not in _LAYERS:
        raise ConfigError(
            f"speculators has no MTP layer for {config.model_type}; it has layers for {', '.join(_LAYERS)}; " + KEEP
        )
    plain = {"hidden_first": False, "norm_output": True, "own_embedding": False, "own_lm_head": False}
    check_expressible(config, "the speculators", KEEP, **plain, quantization=None)


def _layer_type(config: MTPConfig) -> str:
    known, own = _LAYERS[config.model_type], config.layer.get("model_type")
    return str(own) if own in known else known[-1 if config.layer.get("num_experts") else 0]


def _less_one(norm: mx.array) -> mx.array:
    less: mx.array = norm.astype(mx.float32) - 1
    return less.astype(norm.dtype) if bool(mx.array_equal(less.astype(norm.dtype), less)) else less


def _outer(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Rename a head's weights for this layout, with experts as in transformers."""
    names = {mine: theirs for theirs, mine in MIMO.items()}
    made: dict[str, mx.array] = {}
    for name, value in tensors.items():
        module, _, last = name.rpartition(".")
        if module in names:
            made[f"{names[module]}.{last}"] = value
        elif name.endswith(".switch_mlp.gate_proj.weight"):
            up = tensors[name.replace(".gate_proj.", ".up_proj.")]
            made[_expert(name, "gate_up_proj")] = mx.concatenate([value, up], axis=-2)
        elif name.endswith(".switch_mlp.down_proj.weight"):
            made[_expert(name, "down_proj")] = value
        elif not name.endswith(".switch_mlp.up_proj.weight"):
            made[name.removeprefix("block.")] = value
    return {f"mtp_layers.0.{name}": value for name, value in made.items()}


def _expert(name: str, projection: str) -> str:
    return f"{name.removeprefix('block.').split('.switch_mlp.')[0]}.experts.{projection}"


def load_split(folder: Path, _: int | None = None) -> MTPHead:
    """Read a head, whose quantized weights stay quantized (`Format.load`)."""
    file, written, tensors = folder / "config.json", fields.read_config(folder), read_weights(folder)
    own = {name: value for name, value in written.items() if name not in _READ}
    fields.refuse(file, own)
    fields.warn_of_unknown(file, own)
    with fields.reading(file):
        layer = dict(written["text_config"])
        numbers = {_bare(name).split(".")[1] for name in tensors if _bare(name).startswith("layers.")}
        if (count := max(len(numbers), int(layer.get("mtp_num_hidden_layers") or 1))) > 1:
            raise ConfigError(f"it has {count} MTP layers; only one is supported")
        if layer.get("mtp_use_dedicated_embeddings"):
            raise ConfigError("mtp_use_dedicated_embeddings is set, but the layout has no embedding")
        tensors, quantization = common_quantization(written, tensors)
        module, weights = split_layer(layer, tensors)
        config = MTPConfig(module, layer, norm_output=True, quantization=quantization)
    return build(folder, MTPHead, config, weights, _in_file)


def _bare(name: str) -> str:
    return name.removeprefix("mtp.")


def _in_file(name: str) -> str:
    module, _, last = name.rpartition(".")
    return f"{_NAMES[module]}.{last}" if module in _NAMES else name.replace("block.", "layers.0.", 1)


def save_split(head: MTPHead, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    """Write a head in this layout (`Format.save`)."""
    config = head.config
    if config.model_type not in ZERO_CENTRED:
        raise ConfigError(f"the {MODEL_TYPE} layout is for Qwen3.5 and Qwen3-Next, not for {config.model_type}")
    read = {"hidden_first": False, "target_norm": True, "norm_output": True}
    check_expressible(config, f"the {MODEL_TYPE}", KEEP, **read, own_embedding=False, own_lm_head=False)
    written = {
        "model_type": MODEL_TYPE,
        "text_config": {"model_type": config.model_type, **_angles(config), **config.layer, "mtp_num_hidden_layers": 1},
        "block_size": 3,
        "tie_word_embeddings": bool(config.layer.get("tie_word_embeddings", True)),
        **fields.quantization_json(config.quantization),
    }
    save_head(folder, written, {_in_file(name): value for name, value in weights_of(head).items()}, **options)


def _angles(config: MTPConfig) -> dict[str, Any]:
    """Return RoPE's fields for a Qwen3-Next layer, as Qwen3.5 names them: mlx-vlm reads no others."""
    if "rope_parameters" in config.layer:
        return {}
    if config.layer.get("rope_scaling"):
        raise ConfigError(f"the {MODEL_TYPE} layout cannot express rope_scaling; {KEEP}")
    args = layer_args(config.model_type, config.layer)
    share, size = args.partial_rotary_factor, args.head_dim or args.hidden_size // args.num_attention_heads
    rope = {
        "rope_theta": args.rope_theta,
        "partial_rotary_factor": share,
        "mrope_section": [int(share * size) // 2, 0, 0],
    }
    return {"rope_parameters": {"type": "default", **rope}}


def _is_split(config: Mapping[str, Any], _: Mapping[str, mx.array]) -> bool:
    return config.get("model_type") == MODEL_TYPE


FORMATS = (
    Format("mtp", "EAGLE-MLX", (), lambda config, _: FIELD in config, load_mtp, save_mtp),
    Format("speculators", "speculators", ("speculators",), of_speculators("mtp"), load_mtp, save_speculators_mtp),
    Format(MODEL_TYPE, "mlx-vlm, as a split MTP layer", ("mlx-vlm",), _is_split, load_split, save_split),
)
