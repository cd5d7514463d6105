"""What must be the same so that one engine can use what another has written, down to every byte of the weights."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from eagle_mlx.engine.disk.database import BLOCK, Database
from eagle_mlx.engine.disk.snapshot_file import FORMAT
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.proposers.hybrid import model_of
from eagle_mlx.target import Target

log = logging.getLogger("eagle_mlx.prefixes")
_REPORTED_BYTES = 1 << 30
"""From so many bytes of new files on, the log says what is done: a core hashes 1.5 GB/s (EPYC, SHA-256)."""
_THREADS = min(4, os.cpu_count() or 1)
"""Hashing leaves Python's lock, and four cores hash as fast as a disk or a file cache gives."""

In = TypeVar("In")
Out = TypeVar("Out")


def identity(database: Database, target: Target, proposer: Proposer | None, kv_bits: int | None) -> dict[str, Any]:
    """Return all that keys, values and states depend on, as plain values.

    Every byte of the weights counts: those of the files that they were loaded from, and those in memory, which code may
    have changed since. `database`: keeps the hashes of files. A proposer counts if it reads hidden states, because then
    its past is kept with the target's.
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
        "files": _files(target.folder, database),
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


def _files(folder: Path | None, database: Database) -> str | None:
    """Return the hash of a folder's weights; None if there is no folder any more."""
    try:
        return hash_of_files(folder, database) if folder is not None else None
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


def hash_of_files(folder: Path, database: Database) -> str:
    """Return 32 hexadecimal digits made from all bytes of the weights in a folder.

    A file is not read again if the database knows its path, size, time of change and inode. Raises OSError if a file
    cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    facts = {path: _facts(path) for path in files}
    known = database.hashes()
    hashes = {path: known[str(path.resolve())] for path in files if str(path.resolve()) in known}
    new = [path for path in files if path not in hashes or hashes[path][0] != facts[path]]
    if (size := sum(facts[path][0] for path in new)) >= _REPORTED_BYTES:
        log.warning(
            "hashing %.1f GB of weights in %s for the prefix cache; they are not read again until they change",
            size / 1e9,
            folder,
        )
    hashes |= {path: (facts[path], found) for path, found in zip(new, _in_threads(_hash_of_file, new), strict=True)}
    if new and all(_facts(path) == facts[path] for path in new):
        database.keep_hashes((str(path.resolve()), *hashes[path]) for path in new)
    together = "".join(f"{path.name}:{hashes[path][1]}\n" for path in files)
    return hashlib.sha256(together.encode()).hexdigest()[:32]


def hash_of_arrays(module: nn.Module) -> str:
    """Return 32 hexadecimal digits made from all bytes of a module's arrays in memory, their names, shapes and types.

    Each array gets a checksum of 32 bits: a hash proper would make every start of a server wait for longer.
    """
    leaves = sorted(cast(list[tuple[str, mx.array]], tree_flatten(module.parameters())), key=lambda leaf: leaf[0])
    digest = hashlib.sha256()
    on_host = [np.array(x.reshape(-1).view(mx.uint8), copy=False) for _, x in leaves]
    for (name, x), checksum in zip(leaves, _in_threads(lambda data: zlib.crc32(data.data), on_host), strict=True):
        digest.update(f"{name} {x.shape} {x.dtype} {checksum:08x}\n".encode())
    return digest.hexdigest()[:32]


def _in_threads(work: Callable[[In], Out], over: Iterable[In]) -> list[Out]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(work, over))


def _hash_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _facts(path: Path) -> list[int]:
    """Return what tells a file from an earlier one of its name: size, time of change in nanoseconds, and inode."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]
