"""Find and read the MTP layers in the files of published models, and of conversions that kept them.

mlx-lm and its conversions drop these layers. Some other conversions keep Qwen's, quantized, among the model's tensors
(`language_model.mtp.*`) or in a file next to them, `mtp.safetensors`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_mlx.errors import CheckpointError, ConfigError, EagleError, check
from eagle_mlx.formats.fields import read_config
from eagle_mlx.formats.tensors import INDEX, Tensors, check_floating, read_index, read_safetensors, read_tensors

SIDECAR = "mtp.safetensors"  # a file of MTP layers that some conversions write next to the model's own files
SHARED = ("model.embed_tokens.weight", "lm_head.weight")
"""The model's own tensors, to detect copies of them in an MTP layer."""
FILES = {
    **{name: name for name in ("deepseek_v3", "glm4_moe", "mimo", "qwen3", "qwen3_next")},
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), "qwen3_5"),
}
"""Maps a config's model_type to mlx-lm's module."""


def is_source(tensors: Tensors) -> bool:
    """Return whether these tensors are from a model published with MTP layers."""
    pattern = r"^mtp\.|(^|\.)mtp_layers\.\d|(^|\.)layers\.\d+\.eh_proj\."
    return any(re.search(pattern, _published_name(name)) for name in tensors)


def has_mtp_layer(folder: Path) -> bool:
    """Return whether a folder has a published MTP layer of a known architecture, judging by config and tensor names."""
    try:
        config = read_config(folder)
        prefix = mtp_prefix(config)
        names = read_index(folder / INDEX) if (folder / INDEX).exists() else read_tensors(folder)
        return any(_published_name(name).startswith(prefix) for name in [*names, *_sidecar(folder)])
    except (EagleError, KeyError, TypeError, ValueError):
        return False


def published_with_mtp(config: Mapping[str, Any]) -> bool:
    """Return whether a config mentions MTP layers, though a conversion may have dropped them."""
    layer = {**config, **(config.get("text_config") or {})}
    return layer.get("model_type") in FILES and bool(_count(layer))


def mtp_prefix(config: Mapping[str, Any], index: int = 0) -> str:
    """Return the prefix of the tensors of MTP layer `index`. Raises ConfigError if the model has no such layer."""
    file, layer = layer_of(config)
    count = _count(layer)
    if index < 0 or (isinstance(count, int) and index >= count):
        raise ConfigError(f"there is no MTP layer {index}: by its config, the model has {count}, counted from 0")
    if file in ("deepseek_v3", "glm4_moe"):
        return f"model.layers.{int(layer['num_hidden_layers']) + index}."
    return f"model.mtp_layers.{index}." if file == "mimo" else "mtp."


def _count(layer: Mapping[str, Any]) -> Any:
    return layer.get("num_nextn_predict_layers") or layer.get("mtp_num_hidden_layers")


def layer_of(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return mlx-lm's module for a model, and the part of its config about layers. Raises as `file_of`."""
    layer = dict(config.get("text_config") or config)
    return file_of(layer.get("model_type") or config.get("model_type")), layer


def file_of(model_type: Any) -> str:
    """Return mlx-lm's module for models of a type. Raises ConfigError if their MTP layers are not supported."""
    is_known, types = isinstance(model_type, str) and model_type in FILES, ", ".join(sorted(FILES))
    check(is_known, f"MTP layers of model_type {model_type} are not supported, only those of {types}")
    return FILES[model_type]


def shards_of(where: str | Path, weight_map: Mapping[str, str], prefix: str) -> list[str]:
    """Return the files with this prefix's tensors. Raises CheckpointError if there are none, or a name is a path."""
    shards = sorted({shard for name, shard in weight_map.items() if _published_name(name).startswith(prefix)})
    if not shards:
        raise no_layer(where, prefix)
    if strange := [shard for shard in shards if Path(shard).name != shard or shard.startswith(".")]:
        raise CheckpointError(f"the index of {where} names {strange[0]}, which is not a file name; download it again")
    return shards


def read_layer_tensors(folder: Path, prefix: str) -> Tensors:
    """Read the tensors with a prefix, and shared tensors if available.

    Other files of the model may be missing. Raises CheckpointError if a file is missing or damaged.
    """
    if not (folder / INDEX).exists():
        tensors = read_tensors(folder)
    else:
        weight_map, tensors = read_index(folder / INDEX), _sidecar(folder)
        needed = [] if tensors else shards_of(folder, weight_map, prefix)
        for shard in sorted({*needed, *(weight_map[name] for name in SHARED if name in weight_map)}):
            if (folder / shard).exists():
                tensors |= read_safetensors(folder / shard)
            elif shard in needed:
                raise CheckpointError(
                    f"{folder} lacks {shard}, which by its index has {prefix}*; get it from the original repository"
                )
    named = {_published_name(name): value for name, value in tensors.items()}
    own = {name: value for name, value in named.items() if name.startswith(prefix)}
    check_floating(folder, own)
    return own | {name: value for name, value in named.items() if name in SHARED}


def _published_name(name: str) -> str:
    return name.removeprefix("language_model.")


def _sidecar(folder: Path) -> Tensors:
    file = folder / SIDECAR
    return read_safetensors(file) if file.exists() else {}


def no_layer(where: str | Path, prefix: str) -> CheckpointError:
    return CheckpointError(
        f"{where} has no tensors named {prefix}*, so no MTP layer: conversions often leave it out, and some models "
        "have none; use the original model's files"
    )
