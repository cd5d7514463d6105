"""Calls of caches as plain values: what rank 0 has called is called by the others."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from eagle_mlx.decoding.tree import Branches

CACHE_CALLS = (
    *("expect", "branch", "advance", "advance_some", "put_back", "keep", "sync", "save", "restore"),
    *("compact", "zero", "append", "remove", "fork", "piece", "outline", "joined"),
)
"""What changes a RaggedCache, or makes something of one."""
PIECE_CALLS = ("split",)
"""The same of a KVPiece."""
_KINDS = {"int32": mx.int32, "bool": mx.bool_, "float32": mx.float32}
"""Types of the arrays that go with calls."""


def encode(value: Any) -> Any:
    """An argument as JSON has it: numbers, lists of them, arrays, what a tree is read by, and objects by their numbers.

    An array that has not been computed is waited for.
    """
    if isinstance(value, mx.array):
        return _encode_array(value)
    if isinstance(value, Branches):
        return {"seen": encode(value.seen), "depths": encode(value.depths)}
    if isinstance(value, list | tuple):
        return [encode(each) for each in value]
    return {"number": value.number} if hasattr(value, "number") else value


def decode(value: Any, named: Callable[[int], Any]) -> Any:
    """The argument that `encode` made this of; `named` gives an object by its number."""
    if isinstance(value, list):
        return [decode(each, named) for each in value]
    if not isinstance(value, dict):
        return value
    if "number" in value:
        return named(value["number"])
    if "seen" in value:
        return Branches(decode(value["seen"], named), decode(value["depths"], named))
    return _decode_array(value)


def _encode_array(array: mx.array) -> dict[str, Any]:
    values = np.array(array)
    packed = np.packbits(values) if values.dtype == np.bool_ else values
    return {"array": b64encode(packed.tobytes()).decode(), "shape": list(values.shape), "type": str(values.dtype)}


def _decode_array(value: dict[str, Any]) -> mx.array:
    data, shape, kind = b64decode(value["array"]), value["shape"], value["type"]
    if kind == "bool":
        values = np.unpackbits(np.frombuffer(data, np.uint8), count=int(np.prod(shape))).astype(np.bool_)
    else:
        values = np.frombuffer(data, kind)
    return mx.array(values.reshape(shape), _KINDS[kind])
