"""Write MTP heads in the layout of vllm-project/speculators, which only supports Qwen's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Unpack

import mlx.core as mx

from eagle_mlx.errors import ConfigError
from eagle_mlx.formats.fields import NOTED, SPECULATORS_VERSION, proposal_json
from eagle_mlx.formats.tensors import SaveOptions, in_file_type, save_head, weights_of
from eagle_mlx.heads.mtp.head import MTPConfig, MTPHead
from eagle_mlx.heads.mtp.published import MIMO, ZERO_CENTRED, norms_of

_LAYERS = {
    "qwen3": ("qwen3",),
    "qwen3_next": ("qwen3_next",),
    "qwen3_5": ("qwen3_5_text", "qwen3_5_moe_text"),
}
"""Maps mlx-lm's module to speculators' layer types."""


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
    _check_sayable(config)
    zero_centred = config.model_type in ZERO_CENTRED
    weights = in_file_type(weights_of(head), dtype)
    within, around = norms_of(weights) if zero_centred else ([], [])
    exact = {name: _less_one(weights[name]) for name in within + around}
    written = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": SPECULATORS_VERSION,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "transformer_layer_config": {**config.layer, "model_type": _layer_type(config)},
        "speculators_config": proposal_json("mtp", base_model, target_architectures, depth),
    }
    noted = {"target_norm": config.target_norm, **({NOTED: True} if zero_centred else {})}
    save_head(folder, written, _outer(weights), noted, _outer(exact), **options)


def _check_sayable(config: MTPConfig) -> None:
    if config.model_type not in _LAYERS:
        raise ConfigError(
            f"speculators has no MTP layer of {config.model_type}, only of {', '.join(_LAYERS)}; "
            "keep this project's layout"
        )
    for name, only in (
        ("hidden_first", False),
        ("norm_output", True),
        ("own_embedding", False),
        ("own_lm_head", False),
        ("quantization", None),
    ):
        if getattr(config, name) != only:
            raise ConfigError(
                f"the speculators layout cannot express {name}={getattr(config, name)}; keep this project's layout"
            )


def _layer_type(config: MTPConfig) -> str:
    known = _LAYERS[config.model_type]
    if config.layer.get("model_type") in known:
        return str(config.layer["model_type"])
    return known[-1 if config.layer.get("num_experts") else 0]


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
