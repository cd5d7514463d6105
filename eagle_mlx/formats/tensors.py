"""Reading and writing safetensors files, with errors that name the file and the tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from eagle_mlx.errors import CheckpointError


def weights_of(module: nn.Module) -> dict[str, mx.array]:
    """A module's parameters by their full names."""
    return cast("dict[str, mx.array]", tree_flatten(module.parameters(), destination={}))


def write_tensors(file: Path, tensors: Mapping[str, mx.array]) -> None:
    """Write a safetensors file and flush it; OSError where the disk is full (a path given to MLX would hide it)."""
    with file.open("wb") as out:
        mx.save_safetensors(out, dict(tensors), metadata={"format": "pt"})
        out.flush()
        os.fsync(out.fileno())


def read_tensors(folder: Path) -> dict[str, mx.array]:
    """All tensors of a folder's safetensors files; raises CheckpointError for none, or for one that is damaged."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        torch_only = next(folder.glob("pytorch_model*.bin"), None)
        hint = f"; {torch_only.name} must be converted to safetensors first" if torch_only else ""
        raise CheckpointError(f"{folder} holds no .safetensors file{hint}")
    tensors: dict[str, mx.array] = {}
    for file in files:
        _check_length(file)
        try:
            loaded = mx.load(str(file))
        except (RuntimeError, ValueError) as e:
            raise CheckpointError(f"{file} cannot be read as safetensors ({e}); fetch or make it again") from e
        if not isinstance(loaded, dict):
            raise CheckpointError(f"{file} holds no named tensors")
        tensors.update(loaded)
    return tensors


def check_shapes(where: Path, tensors: Mapping[str, mx.array], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise one CheckpointError that names every missing, unknown or wrongly shaped tensor."""
    missing = sorted(expected.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - expected.keys())
    wrong = [
        f"{name} has shape {tuple(tensors[name].shape)}, expected {shape}"
        for name, shape in sorted(expected.items())
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    problems = [
        *([f"missing: {', '.join(missing)}"] if missing else []),
        *([f"not known to this format: {', '.join(unknown)}"] if unknown else []),
        *wrong,
    ]
    if problems:
        raise CheckpointError(f"the tensors in {where} do not fit its config.json; " + "; ".join(problems))


def _check_length(file: Path) -> None:
    """A file cut short loads lazily and fails late, or not at all: compare its size with what its header promises."""
    size = file.stat().st_size
    try:
        with file.open("rb") as raw:
            header_size = int.from_bytes(raw.read(8), "little")
            if size < 8 or header_size > size - 8:
                raise CheckpointError(f"{file} is cut short ({size} bytes); fetch or make it again")
            header = json.loads(raw.read(header_size))
        promised = max((spec["data_offsets"][1] for name, spec in header.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
        raise CheckpointError(f"{file} is no safetensors file; fetch or make it again") from e
    if size != 8 + header_size + promised:
        raise CheckpointError(
            f"{file} has {size} bytes but its header promises {8 + header_size + promised}; fetch or make it again"
        )
