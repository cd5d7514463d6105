"""The disk tier's files: what each covers, its name and content, and the properties that must match.

There are blocks of positions, and boundary states: what cannot be cut, so sliding windows and recurrent states. A file
is in safetensors format, followed by a checksum.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from eagle_mlx.cache.ragged import KVPiece, RaggedCache
from eagle_mlx.engine.prefix_tree import Keys, PrefixPiece
from eagle_mlx.formats.tensors import arrays_of
from eagle_mlx.proposers.base import HeadPiece, Proposer
from eagle_mlx.target import Target

BLOCK = 128
"""Positions per file, counted from the start of a text: 19 MB for a 4B model, which disks read at full speed. Without
windows and states, the rest of a text is not saved."""
CHECKSUM = 4  # bytes at the end of a file
FORMAT = "eagle-mlx-prefix-4"
"""Format version of the files. It is part of the name of a model's folder, so no other version is ever read."""
_THREADS = min(8, os.cpu_count() or 1)
"""Hashing releases the GIL. A core hashes 1.5 GB/s (EPYC, SHA-256), so 20 GB take 2 to 4 s on four to eight cores."""


@dataclass(frozen=True)
class Entry:
    """One file: a block of positions, or the boundary state at one position with those after the last whole block."""

    model: str  # the `identity` of all that the content depends on, and the name of the folder
    kind: str  # `block` or `state`
    digest: str  # of the model, the namespace and the keys up to `end`
    start: int
    end: int
    nbytes: int = 0

    @property
    def path(self) -> str:
        return f"{self.model}/{self.kind}-{self.end:08d}-{self.digest}.prefix"

    def checksum(self, content: bytes | memoryview) -> bytes:
        """Return the checksum that ends the file, of its content and its name."""
        return zlib.crc32(content, zlib.crc32(self.path.encode())).to_bytes(CHECKSUM, "little")


@dataclass(frozen=True)
class Match:
    """The longest prefix of a text that the files have."""

    length: int
    blocks: list[Entry]
    state: Entry | None  # None if every layer keeps every position

    @property
    def entries(self) -> list[Entry]:
        return self.blocks if self.state is None else [*self.blocks, self.state]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def blocks_of(keys: Keys, model: str, namespace: str) -> Iterator[Entry]:
    """Yield the whole blocks of a text."""
    digest = root_of(model, namespace)
    for end in range(BLOCK, len(keys) + 1, BLOCK):
        digest = digest_of(digest, keys[end - BLOCK : end])
        yield Entry(model, "block", digest, end - BLOCK, end)


def state_at(end: int, keys: Keys, model: str, namespace: str, blocks: Sequence[Entry]) -> Entry:
    """Return the boundary state after `end` positions of a text with these whole blocks."""
    start = end // BLOCK * BLOCK
    parent = blocks[start // BLOCK - 1].digest if start else root_of(model, namespace)
    return Entry(model, "state", digest_of(parent, keys[start:end]), start, end)


def root_of(model: str, namespace: str) -> str:
    """Return the digest of an empty text in a namespace, the parent of its first blocks."""
    names = json.dumps([model, namespace])
    return hashlib.blake2b(names.encode(), digest_size=16, person=b"namespace").hexdigest()


def digest_of(parent: str, keys: Keys) -> str:
    return hashlib.blake2b(bytes.fromhex(parent) + keys.tobytes(), digest_size=16).hexdigest()


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
        arrays = {name: np.ascontiguousarray(x) for name, x in self.arrays.items()}
        return safetensors.numpy.save(arrays, {"about": json.dumps(self.about)})


def decode(content: bytes) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Decode the result of `Content.encode` into plain values and arrays on the device.

    Not by `mx.load`: its thread needs the GIL, with which `mx.clear_cache` of another model's engine would wait for it.
    """
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    about = json.loads(header["__metadata__"]["about"])
    arrays = {name: mx.array(x) for name, x in safetensors.numpy.load(content).items()}
    arrays |= {name: arrays[name].view(mx.bfloat16) for name in about["bfloat16"]}
    mx.eval(arrays)
    return about, arrays


def content_of(piece: PrefixPiece, state: RaggedCache | None = None) -> Content:
    """Return the file content for some positions of a text: the target's keys and values, and the head's; and for the
    boundary state after them (`RaggedCache.outline`)."""
    parts, marks = {"target": piece.target.layers}, b""
    if piece.state is not None:
        parts["head"], marks = piece.state.entries.layers, piece.state.marks
    about: dict[str, Any] = {"known": marks.hex(), "layers": {p: list(map(len, layers)) for p, layers in parts.items()}}
    named = {f"{p}.{i}.{j}": x for p, layers in parts.items() for i, of in enumerate(layers) for j, x in enumerate(of)}
    if state is not None:
        about |= {"length": state.lengths.upper, "displaced": [window.displaced[0] for window in state.windows]}
        named |= {f"window.{i}.{j}": x for i, window in enumerate(state.windows) for j, x in enumerate(window.state)}
        layers = enumerate(state.recurrent)
        named |= {f"state.{i}.{j}": x for i, of in layers for j, x in enumerate(of.cache) if x is not None}
    return Content.of(about, named)


def cut(content: Content, start: int, end: int) -> Content:
    """Return positions `start` to `end` of a content from `content_of`, without a copy."""
    marks = bytes.fromhex(content.about["known"])
    spans = {"target": slice(start, end), "head": slice(marks.count(1, 0, start), marks.count(1, 0, end))}
    arrays = {name: x[:, :, spans[name.split(".")[0]]] for name, x in content.arrays.items()}
    return Content({**content.about, "known": marks[start:end].hex()}, arrays)


def piece_from(about: Mapping[str, Any], arrays: Mapping[str, mx.array]) -> PrefixPiece:
    parts = {
        part: KVPiece([[arrays[f"{part}.{i}.{j}"] for j in range(count)] for i, count in enumerate(counts)])
        for part, counts in about["layers"].items()
    }
    head = HeadPiece(parts["head"], bytes.fromhex(about["known"])) if "head" in parts else None
    return PrefixPiece(parts["target"], head)


def joined(pieces: Sequence[PrefixPiece]) -> PrefixPiece:
    heads = [piece.state for piece in pieces if piece.state is not None]
    target = _joined([piece.target for piece in pieces])
    if not heads:
        return PrefixPiece(target, None)
    entries = _joined([head.entries for head in heads])
    return PrefixPiece(target, HeadPiece(entries, b"".join(head.marks for head in heads)))


def _joined(pieces: Sequence[KVPiece]) -> KVPiece:
    """Join each layer; a layer that nothing was written to is empty."""
    written = [[layer for layer in same if layer] for same in zip(*(piece.layers for piece in pieces), strict=True)]
    return KVPiece([[mx.concatenate(list(x), axis=2) for x in zip(*same, strict=True)] for same in written])


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


def identity(target: Target, proposer: Proposer | None, kv_bits: int | None) -> str:
    """Return a hash, as 32 hexadecimal digits, of everything that keys, values and states depend on.

    All weights in memory are hashed, whichever files they came from; their shapes and dtypes show their quantization.
    The proposer is included if it reads hidden states, because its cache is then saved with the target's.
    """
    facts = {
        "format": FORMAT,
        "block": BLOCK,
        "model": type(target.model).__module__,
        **_facts_of(target.model),
        "adapter": target.adapter.digest if target.adapter is not None else None,
        "dtype": str(target.dtype),
        "kv_bits": kv_bits,
        "proposer": None,
        "device": str(mx.default_device()),
        "versions": {name: metadata.version(name) for name in ("mlx", "mlx-lm", "eagle-mlx")},
    }
    if proposer is not None and proposer.aux_layers:
        head = _facts_of(proposer.head) if proposer.head is not None else {}
        kept = {"layers": list(proposer.aux_layers), "windows": proposer.cache_size().windows}
        facts["proposer"] = {"name": proposer.name, **kept, **head}
    return hashlib.blake2s(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _facts_of(model: nn.Module) -> dict[str, Any]:
    """Return hashes of a model's weights and of the file that defines it, which may come with the weights; and its
    configuration: some of it, such as the RoPE base, is in no tensor."""
    try:
        code = hashlib.sha256(Path(inspect.getfile(type(model))).read_bytes()).hexdigest()[:32]
    except (TypeError, OSError):
        code = None
    config = repr(getattr(model, "args", getattr(model, "config", None)))
    return {"code": code, "config": config, "weights": hash_of_arrays(model)}


def hash_of_arrays(module: nn.Module) -> str:
    """Return 32 hexadecimal digits that identify a module's arrays: their bytes, names, shapes and dtypes."""
    leaves = sorted(arrays_of(module.parameters()).items())
    flat = (x.reshape(-1) for _, x in leaves)  # not as bytes: MLX's dimensions are below 2^31
    on_host = [np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x, copy=False) for x in flat]
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = pool.map(lambda data: hashlib.sha256(data).digest(), on_host)
        for (name, x), array in zip(leaves, hashes, strict=True):
            digest.update(f"{name} {x.shape} {x.dtype} ".encode() + array)
    return digest.hexdigest()[:32]
