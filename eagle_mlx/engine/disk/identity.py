"""What must match, down to every byte of the weights, for an engine to use another engine's files."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from eagle_mlx.engine.disk.entries import BLOCK
from eagle_mlx.engine.disk.snapshot_file import FORMAT
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.target import Target, arrays_of

_THREADS = min(8, os.cpu_count() or 1)
"""Hashing releases the GIL. A core hashes 1.5 GB/s (EPYC, SHA-256), so 20 GB take 2 to 4 s on four to eight cores."""


def identity(target: Target, proposer: Proposer | None, kv_bits: int | None) -> str:
    """Return a hash, as 32 hexadecimal digits, of everything that keys, values and states depend on.

    All weights in memory are hashed, whichever files they came from; their shapes and dtypes show their quantization.
    The proposer is included if it reads hidden states, because its cache is then saved with the target's.
    """
    facts = {
        "format": FORMAT,
        "block": BLOCK,
        "model": type(target.model).__module__,
        "code": _code(target.model),
        "config": _config(target.model),
        "weights": hash_of_arrays(target.model),
        "adapter": target.adapter.digest if target.adapter is not None else None,
        "dtype": str(target.dtype),
        "kv_bits": kv_bits,
        "proposer": _proposer(proposer) if proposer is not None and proposer.aux_layers else None,
        "device": str(mx.default_device()),
        "versions": {name: metadata.version(name) for name in ("mlx", "mlx-lm", "eagle-mlx")},
    }
    return hashlib.blake2s(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _proposer(proposer: Proposer) -> Sequence[Any]:
    head = proposer.head
    weights = hash_of_arrays(head) if head is not None else ""
    return [proposer.name, weights, _code(head), _config(head), list(proposer.aux_layers)]


def _code(model: Any) -> str | None:
    """Return a hash of the file that defines a model, which may come with its weights; None without a file."""
    try:
        return hashlib.sha256(Path(inspect.getfile(type(model))).read_bytes()).hexdigest()[:32]
    except (TypeError, OSError):
        return None


def _config(model: Any) -> str:
    """Return a model's configuration: some of it, such as the RoPE base, is in no tensor."""
    return repr(getattr(model, "args", getattr(model, "config", None)))


def hash_of_arrays(module: nn.Module) -> str:
    """Return 32 hexadecimal digits that identify a module's arrays: their bytes, names, shapes and dtypes."""
    leaves = sorted(arrays_of(module.parameters()).items())
    on_host = [np.array(x.reshape(-1).view(mx.uint8), copy=False) for _, x in leaves]
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = pool.map(lambda data: hashlib.sha256(data).digest(), on_host)
        for (name, x), found in zip(leaves, hashes, strict=True):
            digest.update(f"{name} {x.shape} {x.dtype} ".encode() + found)
    return digest.hexdigest()[:32]
