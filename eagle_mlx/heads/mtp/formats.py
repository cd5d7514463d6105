"""File layouts for MTP heads: this project's, that of vllm-project/speculators for Qwen's heads, and mlx-vlm's.

Ours has `enorm`, `hnorm`, `eh_proj`, `block.*` with mlx-lm's names, `norm` and, if the head has its own, `embed_tokens`
and `lm_head`. The fields of MTPConfig are under `eagle_mlx_mtp` in config.json.

mlx-vlm's `qwen3_5_mtp` is the MTP layer of a Qwen3.5 or Qwen3-Next in a folder of its own, often quantized. The tensors
have the published names without `mtp.`, mlx-lm's experts, and norms that multiply by their weights. The model's config
is under `text_config`. `fc` reads the embedding first, then the target's hidden state after its final norm; the next
step reads the output after the head's norm. Source: mlx-vlm 0.7.10 (tests/golden/make_split.py).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Unpack

import mlx.core as mx

from eagle_mlx.errors import CheckpointError, check
from eagle_mlx.formats import fields
from eagle_mlx.formats.tensors import HeadFolder, SaveOptions, Tensors, in_file_type, save_head, weights_of
from eagle_mlx.heads.base import Format, build, check_expressible, of_speculators, speculators_json
from eagle_mlx.heads.mtp import published
from eagle_mlx.heads.mtp.head import MTPConfig, MTPHead, layer_args
from eagle_mlx.heads.mtp.published import MIMO, QWEN, ZERO_CENTRED
from eagle_mlx.heads.precision import quantize

FIELD = "eagle_mlx_mtp"
ARCHITECTURE = "EagleMLXMTPHead"
KEEP = "keep this project's layout"  # what to do with a head that another layout cannot express
_LAYERS = {"qwen3": ("qwen3",), "qwen3_next": ("qwen3_next",), "qwen3_5": ("qwen3_5_text", "qwen3_5_moe_text")}
"""Maps mlx-lm's module to speculators' layer types."""
MODEL_TYPE = "qwen3_5_mtp"
_READ = ("block_size", "tie_word_embeddings")
_NAMES = {ours: theirs for theirs, ours in QWEN.items()}


def save_mtp(head: MTPHead, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": head.config.model_type,
        "hidden_size": head.hidden_size,
        "vocab_size": head.vocab_size,
        FIELD: dataclasses.asdict(head.config),
        **fields.quantization_json(head.config.quantization),
    }
    save_head(folder, config, weights_of(head), **options)


def load_mtp(files: HeadFolder) -> MTPHead:
    values = files.config.get(FIELD)
    if not isinstance(values, dict):
        raise CheckpointError(f"{files.file} has no {FIELD}, so it is not an MTP head of this project")
    if unknown := sorted(values.keys() - {field.name for field in dataclasses.fields(MTPConfig)}):
        raise CheckpointError(f"{files.file} sets {FIELD}.{unknown[0]}, which is not known; update EAGLE-MLX")
    with fields.reading(files.file):
        config = MTPConfig(**values)
    return build(files.folder, MTPHead, config, files.tensors)


def load_speculators_mtp(files: HeadFolder) -> MTPHead:
    with fields.reading(files.file):
        config, tensors = published.mtp_of_speculators(files.config, files.tensors)
    return build(files.folder, MTPHead, config, tensors)


def quantized(head: MTPHead, bits: int = 4, group_size: int = 64) -> MTPHead:
    """Quantize the head's large matrices in place, except expert routers, and return it.

    Raises ConfigError if the hidden size is not a multiple of the group size.
    """
    size = head.hidden_size
    check(size % group_size == 0, f"a hidden size of {size} is not a multiple of the group size {group_size}")
    quantize(head, bits, group_size)
    return head


def save_speculators_mtp(head: MTPHead, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    """Write a head for speculators (`Format.save`).

    Norms that are published zero-centered are written that way, in float32 if `dtype` would lose a digit. The layout
    has no field for which hidden state is read, so it is stored under `eagle_mlx`.
    """
    config, dtype = head.config, options.get("dtype", mx.bfloat16)
    _check_expressible(config)
    zero_centred = config.model_type in ZERO_CENTRED
    weights = in_file_type(weights_of(head), dtype)
    within, around = published.norms_of(weights) if zero_centred else ([], [])
    exact = {name: _less_one(weights[name]) for name in within + around}
    written = {
        "architectures": ["MTPDraftModel"],
        **speculators_json("mtp", options),
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": {**config.layer, "model_type": _layer_type(config)},
    }
    noted = {"target_norm": config.target_norm, **({fields.NOTED: True} if zero_centred else {})}
    save_head(folder, written, _outer(weights), noted, _outer(exact), **options)


def _check_expressible(config: MTPConfig) -> None:
    kind, kinds = config.model_type, ", ".join(_LAYERS)
    check(kind in _LAYERS, f"speculators has no MTP layer for {kind}; it has layers for {kinds}; {KEEP}")
    plain = {"hidden_first": False, "norm_output": True, "own_embedding": False, "own_lm_head": False}
    check_expressible(config, "the speculators", KEEP, **plain, quantization=None)


def _layer_type(config: MTPConfig) -> str:
    types, own = _LAYERS[config.model_type], config.layer.get("model_type")
    return str(own) if own in types else types[-1 if config.layer.get("num_experts") else 0]


def _less_one(norm: mx.array) -> mx.array:
    less: mx.array = norm.astype(mx.float32) - 1
    return less.astype(norm.dtype) if bool(mx.array_equal(less.astype(norm.dtype), less)) else less


def _outer(tensors: Tensors) -> Tensors:
    """Rename a head's weights for this layout, with experts as in transformers."""
    names = {mine: theirs for theirs, mine in MIMO.items()}
    made: Tensors = {}
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


def load_split(files: HeadFolder) -> MTPHead:
    """Make a head of its files; quantized weights stay quantized (`Format.load`)."""
    own = {name: value for name, value in files.config.items() if name not in _READ}
    fields.refuse(files.file, own)
    fields.warn_of_unknown(files.file, own)
    with fields.reading(files.file):
        layer, names = dict(files.config["text_config"]), [name.removeprefix("mtp.") for name in files.tensors]
        numbers = {name.split(".")[1] for name in names if name.startswith("layers.")}
        count = max(len(numbers), int(layer.get("mtp_num_hidden_layers") or 1))
        check(count == 1, f"it has {count} MTP layers; only one is supported")
        dedicated = layer.get("mtp_use_dedicated_embeddings")
        check(not dedicated, "mtp_use_dedicated_embeddings is set, but the layout has no embedding")
        tensors, quantization = published.common_quantization(files.config, files.tensors)
        module, weights = published.split_layer(layer, tensors)
        config = MTPConfig(module, layer, norm_output=True, quantization=quantization)
    return build(files.folder, MTPHead, config, weights, _in_file)


def _in_file(name: str) -> str:
    module, _, last = name.rpartition(".")
    return f"{_NAMES[module]}.{last}" if module in _NAMES else name.replace("block.", "layers.0.", 1)


def save_split(head: MTPHead, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    config = head.config
    kind = config.model_type
    check(kind in ZERO_CENTRED, f"the {MODEL_TYPE} layout is for Qwen3.5 and Qwen3-Next, not for {kind}")
    read = {"hidden_first": False, "target_norm": True, "norm_output": True}
    check_expressible(config, f"the {MODEL_TYPE}", KEEP, **read, own_embedding=False, own_lm_head=False)
    written = {
        "model_type": MODEL_TYPE,
        "text_config": {"model_type": kind, **_angles(config), **config.layer, "mtp_num_hidden_layers": 1},
        "block_size": 3,
        "tie_word_embeddings": bool(config.layer.get("tie_word_embeddings", True)),
        **fields.quantization_json(config.quantization),
    }
    save_head(folder, written, {_in_file(name): value for name, value in weights_of(head).items()}, **options)


def _angles(config: MTPConfig) -> dict[str, Any]:
    """Return RoPE's fields for a Qwen3-Next layer, as Qwen3.5 names them: mlx-vlm reads no others."""
    if "rope_parameters" in config.layer:
        return {}
    is_plain = not config.layer.get("rope_scaling")
    check(is_plain, f"the {MODEL_TYPE} layout cannot express rope_scaling; {KEEP}")
    args = layer_args(config.model_type, config.layer)
    share, size = args.partial_rotary_factor, args.head_dim or args.hidden_size // args.num_attention_heads
    angles = {"rope_theta": args.rope_theta, "partial_rotary_factor": share}
    return {"rope_parameters": {"type": "default", **angles, "mrope_section": [int(share * size) // 2, 0, 0]}}


_OF_SPECULATORS = of_speculators("mtp"), load_speculators_mtp, save_speculators_mtp
_SPLIT = (lambda config, _: config.get("model_type") == MODEL_TYPE), load_split, save_split
FORMATS = (
    Format("mtp", "EAGLE-MLX", (), lambda config, _: FIELD in config, load_mtp, save_mtp),
    Format("speculators", "speculators", ("speculators",), *_OF_SPECULATORS),
    Format(MODEL_TYPE, "mlx-vlm, as a split MTP layer", ("mlx-vlm",), *_SPLIT),
)
