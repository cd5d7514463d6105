"""The disk tier's safetensors files: blocks of positions, and the boundary states between them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from eagle_mlx.cache import RaggedCache
from eagle_mlx.cache.ragged import KVPiece
from eagle_mlx.engine.prefix_tree import PrefixPiece
from eagle_mlx.proposers.base import HeadPiece

FORMAT = "eagle-mlx-prefix-3"
"""Format version of the files. It is part of the name of a model's folder, so no other version is ever read."""
Layers = list[list[mx.array]]
"""For each layer, arrays [1, heads, L, D], as in `KVPiece`."""


@dataclass(frozen=True)
class Content:
    """The content of a file: arrays in host memory, and a few plain values."""

    about: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    """bfloat16 arrays are stored as uint16, because numpy has no bfloat16; `about` lists them."""

    @classmethod
    def of(cls, about: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> Content:
        """Evaluate arrays and view them on the host, without a copy."""
        wide = [name for name, x in arrays.items() if x.dtype == mx.bfloat16]
        views = {name: x.view(mx.uint16) if name in wide else x for name, x in arrays.items()}
        mx.eval(views)  # all at once, because each call waits for the device
        on_host = {name: np.array(x, copy=False) for name, x in views.items()}
        return cls({**about, "bfloat16": wide}, on_host)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays.values())

    def encode(self) -> bytes:
        """Return the bytes of a safetensors file."""
        arrays = {name: np.ascontiguousarray(x) for name, x in self.arrays.items()}
        return safetensors.numpy.save(arrays, {"about": json.dumps(self.about)})


def decode(content: bytes) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Decode the result of `Content.encode` into plain values and arrays on the device."""
    found: Any = mx.load(io.BytesIO(content), format="safetensors", return_metadata=True)
    arrays, words = found
    about = json.loads(words["about"])
    arrays |= {name: arrays[name].view(mx.bfloat16) for name in about["bfloat16"]}
    mx.eval(arrays)
    return about, arrays


def content_of(piece: PrefixPiece) -> Content:
    """Return the file content for some positions of a text: the target's keys and values, and the head's."""
    parts = {"target": piece.target.layers}
    about: dict[str, Any] = {"known": ""}
    if piece.state is not None:
        head = cast(HeadPiece, piece.state)
        parts["head"] = head.entries.layers
        about["known"] = head.known.hex()
    about["layers"] = {part: list(map(len, layers)) for part, layers in parts.items()}
    named = {f"{p}.{i}.{j}": x for p, layers in parts.items() for i, of in enumerate(layers) for j, x in enumerate(of)}
    return Content.of(about, named)


def cut(content: Content, start: int, end: int) -> Content:
    """Return positions `start` to `end` of a content from `content_of`, without a copy."""
    known = bytes.fromhex(content.about["known"])
    spans = {"target": slice(start, end), "head": slice(known.count(1, 0, start), known.count(1, 0, end))}
    arrays = {name: x[:, :, spans[name.split(".")[0]]] for name, x in content.arrays.items()}
    return Content({**content.about, "known": known[start:end].hex()}, arrays)


def piece_from(about: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> PrefixPiece:
    parts = {
        part: KVPiece([[arrays[f"{part}.{i}.{j}"] for j in range(count)] for i, count in enumerate(counts)])
        for part, counts in about["layers"].items()
    }
    head = HeadPiece(parts["head"], bytes.fromhex(about["known"])) if "head" in parts else None
    return PrefixPiece(parts["target"], head)


def joined(pieces: Sequence[PrefixPiece]) -> PrefixPiece:
    heads = [cast(HeadPiece, piece.state) for piece in pieces if piece.state is not None]
    target = KVPiece(_joined([piece.target.layers for piece in pieces]))
    if not heads:
        return PrefixPiece(target, None)
    entries = KVPiece(_joined([head.entries.layers for head in heads]))
    return PrefixPiece(target, HeadPiece(entries, b"".join(head.known for head in heads)))


def _joined(pieces: Sequence[Layers]) -> Layers:
    """Join each layer; a layer that nothing was written to is empty."""
    written = [[layer for layer in same if layer] for same in zip(*pieces, strict=True)]
    return [[mx.concatenate(list(x), axis=2) for x in zip(*same, strict=True)] for same in written]


def content_of_state(state: RaggedCache) -> Content:
    """Return the file content for a boundary state (`RaggedCache.outline`)."""
    windows = {f"window.{i}.{j}": x for i, window in enumerate(state.windows) for j, x in enumerate(window.state)}
    recurrent = {
        f"state.{i}.{j}": x
        for i, layer in enumerate(state.recurrent)
        for j, x in enumerate(layer.cache)
        if x is not None
    }
    displaced = [window.displaced[0] for window in state.windows]
    return Content.of({"length": state.lengths.upper, "displaced": displaced}, windows | recurrent)


def state_from(
    model: nn.Module, kv_bits: int | None, about: Mapping[str, Any], arrays: Mapping[str, mx.array]
) -> RaggedCache:
    """Return the boundary state in a file of the same model."""
    cache = RaggedCache.of(model, 1, kv_bits)
    cache.lengths.sync([about["length"]])
    for i, (window, displaced) in enumerate(zip(cache.windows, about["displaced"], strict=True)):
        window.keys, window.values = arrays.get(f"window.{i}.0"), arrays.get(f"window.{i}.1")
        window.displaced = [displaced]
    for i, state in enumerate(cache.recurrent):
        state.cache = [arrays.get(f"state.{i}.{j}") for j in range(len(state.cache))]
    return cache
