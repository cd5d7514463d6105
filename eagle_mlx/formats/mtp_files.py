"""Which files of a published model hold its MTP layer: of hundreds of gigabytes one or two."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from eagle_mlx.errors import CheckpointError
from eagle_mlx.formats.tensors import INDEX, check_floating, read_index, read_safetensors, read_tensors

SHARED = ("model.embed_tokens.weight", "lm_head.weight")
"""The model's own, which a layer's copies are compared with where they are at hand."""


def shards_of(where: str | Path, weight_map: Mapping[str, str], prefix: str) -> list[str]:
    """The files that hold tensors whose names begin so. Raises CheckpointError for none, or for a name with a path."""
    shards = sorted({shard for name, shard in weight_map.items() if name.startswith(prefix)})
    if not shards:
        raise no_layer(where, prefix)
    strange = [shard for shard in shards if Path(shard).name != shard or shard.startswith(".")]
    if strange:
        raise CheckpointError(f"the index of {where} names {strange[0]}, which is no file's name; fetch it again")
    return shards


def read_mtp_tensors(folder: Path, prefix: str) -> dict[str, mx.array]:
    """The tensors under a prefix, and of the shared ones those that are at hand; nothing else is read.

    Other files of the model may be missing. Raises CheckpointError for a file that is missing or damaged.
    """
    index = folder / INDEX
    found = _wanted(read_tensors(folder), prefix) if not index.exists() else _of_shards(folder, index, prefix)
    check_floating(folder, {name: value for name, value in found.items() if name not in SHARED})
    return found


def _of_shards(folder: Path, index: Path, prefix: str) -> dict[str, mx.array]:
    weight_map = read_index(index)
    shards = shards_of(folder, weight_map, prefix)
    missing = [shard for shard in shards if not (folder / shard).exists()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing)}, which by its index holds {prefix}*; fetch it from the original "
            "repository"
        )
    shards += sorted({weight_map[name] for name in SHARED if name in weight_map} - set(shards))
    tensors: dict[str, mx.array] = {}
    for file in (folder / shard for shard in shards):
        if file.exists():
            tensors |= _wanted(read_safetensors(file), prefix)
    return tensors


def no_layer(where: str | Path, prefix: str) -> CheckpointError:
    return CheckpointError(
        f"{where} holds no tensors named {prefix}*, so no MTP layer: conversions often leave it out, and some models "
        "have none; take the original model's files"
    )


def _wanted(tensors: Mapping[str, mx.array], prefix: str) -> dict[str, mx.array]:
    return {name: value for name, value in tensors.items() if name.startswith(prefix) or name in SHARED}
