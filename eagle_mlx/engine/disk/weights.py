"""Hashes of all bytes of weights: of files, computed once for each, and of arrays in memory."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from eagle_mlx.files import PART, write_whole

log = logging.getLogger("eagle_mlx.prefixes")
KNOWN = "weights.json"
"""The file in the cache folder that keeps the hashes of files."""
_TOLD_BYTES = 1 << 30
"""From so many bytes of new files on, the log says what is done: a core hashes 1.5 GB/s (EPYC, SHA-256)."""
_THREADS = min(4, os.cpu_count() or 1)
"""Hashing leaves Python's lock, and four cores hash as fast as a disk or a file cache gives."""

In = TypeVar("In")
Out = TypeVar("Out")


def hash_of_files(folder: Path, root: Path) -> str:
    """Return 32 hexadecimal digits made from all bytes of the weights in a folder.

    A file that is known in `root` by its path, size, time of change and inode is not read again. Raises OSError if a
    file cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    facts = {path.name: _facts(path) for path in files}
    known = _known(root)
    new = [path for path in files if known.get(str(path.resolve()), [])[:-1] != facts[path.name]]
    if (size := sum(int(facts[path.name][0]) for path in new)) >= _TOLD_BYTES:
        log.warning(
            "hashing %.1f GB of weights in %s for the prefix cache; they are not read again until they change",
            size / 1e9,
            folder,
        )
    for path, found in zip(new, _in_threads(_hash_of_file, new), strict=True):
        known[str(path.resolve())] = [*facts[path.name], found]
    if new and all(_facts(path) == facts[path.name] for path in new):
        _keep(root, known)
    together = "".join(f"{path.name}:{known[str(path.resolve())][-1]}\n" for path in files)
    return hashlib.sha256(together.encode()).hexdigest()[:32]


def hash_of_arrays(module: nn.Module) -> str:
    """Return 32 hexadecimal digits made from all bytes of a module's arrays in memory, their names, shapes and types.

    Each array gets a checksum of 32 bits: a hash proper would make every start of a server wait for longer.
    """
    leaves = sorted(cast(list[tuple[str, mx.array]], tree_flatten(module.parameters())), key=lambda leaf: leaf[0])
    digest = hashlib.sha256()
    sums = _in_threads(_checksum, [_on_host(x) for _, x in leaves])
    for (name, x), checksum in zip(leaves, sums, strict=True):
        digest.update(f"{name} {x.shape} {x.dtype} {checksum:08x}\n".encode())
    return digest.hexdigest()[:32]


def _in_threads(work: Callable[[In], Out], over: Iterable[In]) -> list[Out]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(work, over))


def _hash_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _on_host(x: mx.array) -> NDArray[np.uint8]:
    """Return an array's bytes, [N] uint8, without a copy on the host's own memory."""
    return np.array(x.reshape(-1).view(mx.uint8), copy=False)


def _checksum(data: NDArray[np.uint8]) -> int:
    return zlib.crc32(data.data)


def _facts(path: Path) -> list[int | str]:
    """What tells a file from what it was: its size, time of change in nanoseconds, and inode."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _known(root: Path) -> dict[str, list[int | str]]:
    """Return what earlier starts have found, by path; nothing if the file is missing or damaged."""
    try:
        if not (root / KNOWN).is_file():  # opening a FIFO would wait
            return {}
        found = json.loads((root / KNOWN).read_text(encoding="utf-8"))
        return {path: entry for path, entry in found.items() if _is_entry(entry)}
    except (OSError, ValueError, AttributeError):
        return {}


def _is_entry(entry: object) -> bool:
    return isinstance(entry, list) and list(map(type, entry)) == [int, int, int, str] and len(entry[3]) == 64


def _keep(root: Path, known: dict[str, list[int | str]]) -> None:
    """Write the file whole; without it, the next start computes the hashes again."""
    with suppress(OSError):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        here = {path: entry for path, entry in known.items() if Path(path).exists()}
        write_whole(root / KNOWN, json.dumps(here, indent=1).encode(), root / f".{KNOWN}.{os.getpid()}{PART}")
