"""File layouts for MTP heads: this project's own, and that of vllm-project/speculators, which only supports Qwen's.

Ours has `enorm`, `hnorm`, `eh_proj`, `block.*` with mlx-lm's names, `norm` and, if the head has its own, `embed_tokens`
and `lm_head`. The fields of MTPConfig are under `eagle_mlx_mtp` in config.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import mlx.core as mx

from eagle_mlx.errors import CheckpointError, ConfigError
from eagle_mlx.formats.fields import NOTED, quantization_json, read_config, reading, speculators_json
from eagle_mlx.formats.tensors import SaveOptions, in_file_type, read_weights, save_head, weights_of
from eagle_mlx.heads.base import build
from eagle_mlx.heads.kinds import check_expressible
from eagle_mlx.heads.mtp.head import MTPConfig, MTPHead
from eagle_mlx.heads.mtp.published import MIMO, ZERO_CENTRED, mtp_of_speculators, norms_of
from eagle_mlx.heads.precision import quantize

FIELD = "eagle_mlx_mtp"
ARCHITECTURE = "EagleMLXMTPHead"
KEEP = "keep this project's layout"
"""What to do with a head that another layout cannot express."""
_LAYERS = {"qwen3": ("qwen3",), "qwen3_next": ("qwen3_next",), "qwen3_5": ("qwen3_5_text", "qwen3_5_moe_text")}
"""Maps mlx-lm's module to speculators' layer types."""


def save_mtp(head: MTPHead, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    """Write a head to a folder, which appears only once complete. Quantized weights stay quantized.

    Raises OutputError if the folder cannot be written.
    """
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": head.config.model_type,
        "hidden_size": head.hidden_size,
        "vocab_size": head.vocab_size,
        FIELD: dataclasses.asdict(head.config),
        **quantization_json(head.config.quantization),
    }
    save_head(folder, config, weights_of(head), **options)


def load_mtp(folder: str | Path) -> MTPHead:
    """Read a head in either layout.

    Raises CheckpointError if the folder is in neither layout, if a file is damaged, or if any tensor is missing,
    unknown or of the wrong shape.
    """
    folder = Path(folder)
    written, tensors = read_config(folder), read_weights(folder)
    if written.get("speculators_model_type") == "mtp":
        with reading(folder / "config.json"):
            config, tensors, _ = mtp_of_speculators(written, tensors)
    else:
        config = _from_json(folder, written)
    return build(folder, MTPHead, config, tensors)


def _from_json(folder: Path, written: Mapping[str, Any]) -> MTPConfig:
    file = folder / "config.json"
    fields = written.get(FIELD)
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file} has no {FIELD}, so it is not an MTP head of this project")
    unknown = sorted(fields.keys() - {field.name for field in dataclasses.fields(MTPConfig)})
    if unknown:
        raise CheckpointError(f"{file} sets {FIELD}.{unknown[0]}, which is not known; update EAGLE-MLX")
    with reading(file):
        return MTPConfig(**fields)


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
    """Write a head in this layout to a folder, which appears only once complete.

    Norms that are published zero-centered are written that way, in float32 if `dtype` would lose a digit (a float32
    head may lose the last digit). The layout has no field for which hidden state is read, so it is stored under
    `eagle_mlx`. `base_model` and `depth` are as in `save_speculators`. Raises ConfigError if this layout cannot express
    the head, OutputError if the folder cannot be written.
    """
    config, dtype = head.config, options.get("dtype", mx.bfloat16)
    _check_expressible(config)
    zero_centred = config.model_type in ZERO_CENTRED
    weights = in_file_type(weights_of(head), dtype)
    within, around = norms_of(weights) if zero_centred else ([], [])
    exact = {name: _less_one(weights[name]) for name in within + around}
    written = {
        "architectures": ["MTPDraftModel"],
        **speculators_json("mtp", base_model, target_architectures, depth),
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": {**config.layer, "model_type": _layer_type(config)},
    }
    noted = {"target_norm": config.target_norm, **({NOTED: True} if zero_centred else {})}
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
