"""Telling one target from another, so that work that was begun with one is not gone on with by the other."""

from __future__ import annotations

import hashlib
from typing import cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from eagle_mlx.target import Target

_VALUES = 64
"""Values of every tensor that are looked at: enough to tell trained models apart, and quick for large ones."""


def fingerprint(target: Target) -> str:
    """Hexadecimal digits made from the target's tensors (names, shapes, types, first values) and chat template."""
    digest = hashlib.blake2s()
    template = getattr(target.tokenizer, "chat_template", None)
    digest.update(str(template).encode(errors="replace"))
    leaves = cast(list[tuple[str, mx.array]], tree_flatten(target.model.parameters()))
    leaves.sort(key=lambda leaf: leaf[0])
    firsts = [leaf.reshape(-1)[:_VALUES].astype(mx.float32) for _, leaf in leaves]
    mx.eval(firsts)
    for (name, leaf), first in zip(leaves, firsts, strict=True):
        digest.update(f"{name}{leaf.shape}{leaf.dtype}".encode())
        digest.update(np.array(first).tobytes())
    return digest.hexdigest()[:16]
