"""What has to be the same for what one engine has written to be of use to another, and to be right."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.engine.disk.file import FORMAT
from eagle_mlx.engine.disk.index import BLOCK
from eagle_mlx.engine.disk.weights import hash_of_arrays, hash_of_files
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.proposers.hybrid import model_of
from eagle_mlx.target import Target


def identity(root: Path, target: Target, proposer: Proposer | None, kv_bits: int | None) -> dict[str, Any]:
    """Return all that keys, values and states depend on, as plain values.

    Every byte of the weights counts: those of the files that they were loaded from, and those in memory, which code may
    have changed since. `root`: the folder where the hashes of files are kept. A proposer counts if it reads hidden
    states, because then its past is kept with the target's.
    """
    model = model_of(proposer)
    reads = model is not None and model.aux_layers
    versions = {name: _version(name) for name in ("mlx", "mlx-lm", "eagle-mlx")}
    return {
        "format": FORMAT,
        "block": BLOCK,
        "model": type(target.model).__module__,
        "code": _code(target.model),
        "config": _config(target.model),
        "quantization": _quantization(target.model),
        "weights": hash_of_arrays(target.model),
        "files": _files(target.folder, root),
        "adapter": target.adapter.digest if target.adapter is not None else None,
        "dtype": str(target.dtype),
        "kv_bits": kv_bits,
        "proposer": _proposer(model) if model is not None and reads else None,
        "device": str(mx.default_device()),
        "versions": versions,
    }


def digest_of(facts: dict[str, Any]) -> str:
    """32 hexadecimal digits."""
    return hashlib.blake2s(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _proposer(proposer: Proposer) -> Sequence[Any]:
    head = getattr(proposer, "head", None)
    weights = hash_of_arrays(head) if isinstance(head, nn.Module) else getattr(proposer, "identity", "")
    return [proposer.name, weights, _code(head), _config(head), list(proposer.aux_layers)]


def _files(folder: Path | None, root: Path) -> str | None:
    """Return the hash of a folder's weights; None if there is no folder any more."""
    try:
        return hash_of_files(folder, root) if folder is not None else None
    except OSError:  # the hash of the arrays in memory tells models apart too
        return None


def _code(model: Any) -> str | None:
    """Return a hash of the file that defines a model, which may have come with its weights; None if there is none."""
    try:
        return hashlib.sha256(Path(inspect.getfile(type(model))).read_bytes()).hexdigest()[:32]
    except (TypeError, OSError):
        return None


def _quantization(model: nn.Module) -> list[list[Any]]:
    """Return how many modules are quantized in which way, as [bits, group size, mode, count]."""
    found: Counter[tuple[Any, ...]] = Counter()
    for module in model.modules():
        if "scales" in module:
            found[tuple(getattr(module, name, None) for name in ("bits", "group_size", "mode"))] += 1
    return [[*how, count] for how, count in sorted(found.items(), key=str)]


def _config(model: Any) -> str:
    """What a model was built with: its positions' angles, for instance, are in no tensor."""
    return repr(getattr(model, "args", getattr(model, "config", None)))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
