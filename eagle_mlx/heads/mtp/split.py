"""mlx-vlm's layout `qwen3_5_mtp`: the MTP layer of a Qwen3.5 or Qwen3-Next in a folder of its own, often quantized.

The tensors have the published names without `mtp.`, mlx-lm's experts, and norms that multiply by their weights. The
model's config is under `text_config`. Source: mlx-vlm 0.6, `speculative/drafters/mtp_split.py` and `qwen3_5_mtp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import mlx.core as mx

from eagle_mlx.errors import ConfigError
from eagle_mlx.formats.fields import quantization_json, read_config, read_quantization, reading
from eagle_mlx.formats.tensors import SaveOptions, read_weights, save_head, weights_of
from eagle_mlx.heads.base import build
from eagle_mlx.heads.mtp.formats import check_choices
from eagle_mlx.heads.mtp.head import MTPConfig, MTPHead
from eagle_mlx.heads.mtp.published import QWEN, ZERO_CENTRED, split_layer

MODEL_TYPE = "qwen3_5_mtp"


def holds_split(config: Mapping[str, Any], _: Mapping[str, mx.array]) -> bool:
    """Return whether files are in this layout."""
    return config.get("model_type") == MODEL_TYPE


def load_split(folder: str | Path) -> MTPHead:
    """Read a head, whose quantized weights stay quantized. Raises CheckpointError as `load_mtp`."""
    folder = Path(folder)
    written, tensors = read_config(folder), read_weights(folder)
    with reading(folder / "config.json"):
        layer = dict(written["text_config"])
        if layer.get("mtp_num_hidden_layers") not in (None, 1):
            raise ConfigError(f"it has {layer['mtp_num_hidden_layers']} MTP layers; only one is supported")
        if layer.get("mtp_use_dedicated_embeddings"):
            raise ConfigError("mtp_use_dedicated_embeddings is set, but the layout has no embedding")
        file, weights = split_layer(layer, tensors)
        config = MTPConfig(file, layer, norm_output=True, quantization=read_quantization(written))
    return build(folder, MTPHead, config, weights)


def save_split(head: MTPHead, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    """Write a head to a folder, which appears only once complete. Quantized weights stay quantized.

    Raises ConfigError if this layout cannot express the head, OutputError if the folder cannot be written.
    """
    config = head.config
    if config.model_type not in ZERO_CENTRED:
        raise ConfigError(f"the {MODEL_TYPE} layout is for Qwen3.5 and Qwen3-Next, not for {config.model_type}")
    ends = {"own_embedding": False, "own_lm_head": False}
    check_choices(config, MODEL_TYPE, hidden_first=False, target_norm=True, norm_output=True, **ends)
    names = {mine: theirs for theirs, mine in QWEN.items()}
    tensors = {}
    for name, value in weights_of(head).items():
        module, _, last = name.rpartition(".")
        own = f"{names[module]}.{last}" if module in names else f"layers.0.{name.removeprefix('block.')}"
        tensors[own] = value
    written = {
        "model_type": MODEL_TYPE,
        "text_config": {**config.layer, "mtp_num_hidden_layers": 1},
        "block_size": 3,
        "tie_word_embeddings": bool(config.layer.get("tie_word_embeddings", True)),
        **quantization_json(config.quantization),
    }
    save_head(folder, written, tensors, **options)
