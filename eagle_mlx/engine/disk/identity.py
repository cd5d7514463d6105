"""What has to be the same for what one engine has written to be of use to another, and to be right."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import mlx.core as mx

from eagle_mlx.engine.disk.file import FORMAT
from eagle_mlx.engine.disk.index import BLOCK
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.proposers.hybrid import model_of
from eagle_mlx.target import Target, fingerprint


def identity(target: Target, proposer: Proposer | None, kv_bits: int | None) -> dict[str, Any]:
    """All that keys, values and states depend on, as plain values.

    A proposer counts where it reads hidden states, because then its past is kept with the target's.
    """
    model = model_of(proposer)
    reads = model is not None and model.aux_layers
    versions = {name: _version(name) for name in ("mlx", "mlx-lm", "eagle-mlx")}
    return {
        "format": FORMAT,
        "block": BLOCK,
        "model": type(target.model).__module__,
        "config": _config(target.model),
        "weights": fingerprint(target),
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
    return [proposer.name, getattr(proposer, "identity", ""), _config(head), list(proposer.aux_layers)]


def _config(model: Any) -> str:
    """What a model was built with: its positions' angles, for instance, are in no tensor."""
    return repr(getattr(model, "args", getattr(model, "config", None)))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
