"""mlx-vlm's layout `qwen3_5_mtp`: the MTP layer of a Qwen3.5 or Qwen3-Next in a folder of its own, often quantized.

The tensors have the published names without `mtp.`, mlx-lm's experts, and norms that multiply by their weights. The
model's config is under `text_config`; `block_size` only says how many tokens to draft. `fc` reads the embedding first,
the target's hidden state enters after its final norm, and the next step reads the output after the head's norm.
Source: mlx-vlm 0.7.10, `speculative/drafters/mtp_split.py` and `qwen3_5_mtp` (tests/golden/make_split.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import mlx.core as mx

from eagle_mlx.errors import ConfigError
from eagle_mlx.formats.fields import (
    Quantization,
    quantization_json,
    read_config,
    read_quantization,
    reading,
    refuse,
    warn_of_unknown,
)
from eagle_mlx.formats.tensors import SaveOptions, read_weights, save_head, weights_of
from eagle_mlx.heads.base import build
from eagle_mlx.heads.kinds import check_expressible
from eagle_mlx.heads.mtp.formats import KEEP
from eagle_mlx.heads.mtp.head import MTPConfig, MTPHead, layer_args
from eagle_mlx.heads.mtp.published import QWEN, ZERO_CENTRED, split_layer

MODEL_TYPE = "qwen3_5_mtp"
_READ = ("block_size", "tie_word_embeddings")
_NAMES = {ours: theirs for theirs, ours in QWEN.items()}


def holds_split(config: Mapping[str, Any], _: Mapping[str, mx.array]) -> bool:
    """Return whether files are in this layout."""
    return config.get("model_type") == MODEL_TYPE


def load_split(folder: str | Path) -> MTPHead:
    """Read a head, whose quantized weights stay quantized. Raises CheckpointError as `load_mtp`."""
    folder = Path(folder)
    file, written, tensors = folder / "config.json", read_config(folder), read_weights(folder)
    own = {name: value for name, value in written.items() if name not in _READ}
    refuse(file, own)
    warn_of_unknown(file, own)
    with reading(file):
        layer = dict(written["text_config"])
        numbers = {_bare(name).split(".")[1] for name in tensors if _bare(name).startswith("layers.")}
        if (count := max(len(numbers), int(layer.get("mtp_num_hidden_layers") or 1))) > 1:
            raise ConfigError(f"it has {count} MTP layers; only one is supported")
        if layer.get("mtp_use_dedicated_embeddings"):
            raise ConfigError("mtp_use_dedicated_embeddings is set, but the layout has no embedding")
        module, weights = split_layer(layer, tensors)
        config = MTPConfig(module, layer, norm_output=True, quantization=_quantization(written, tensors))
    return build(folder, MTPHead, config, weights, _in_file)


def _quantization(written: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> Quantization | None:
    """Return the quantization of the layers with scales, which must be the same for all.

    A field that was copied from the model's config may name layers, the head's or others, with their own.
    """
    how = written.get("quantization")
    if not isinstance(how, dict):
        return read_quantization(written)
    common = {name: value for name, value in how.items() if not isinstance(value, dict | bool)}
    found: Quantization | None = None
    for name in sorted(_bare(name).removesuffix(".scales") for name in tensors if name.endswith(".scales")):
        own = read_quantization({"quantization": how.get(name) or common})
        if found not in (None, own):
            raise ConfigError(f"quantization of {name} is {own}, of others {found}; quantize all layers alike")
        found = own
    return found


def _bare(name: str) -> str:
    return name.removeprefix("mtp.")


def _in_file(name: str) -> str:
    """Return the name of one of the head's tensors in this layout."""
    module, _, last = name.rpartition(".")
    return f"{_NAMES[module]}.{last}" if module in _NAMES else name.replace("block.", "layers.0.", 1)


def save_split(head: MTPHead, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    """Write a head to a folder, which appears only once complete. Quantized weights stay quantized.

    Raises ConfigError if this layout cannot express the head, OutputError if the folder cannot be written.
    """
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
        **quantization_json(config.quantization),
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
