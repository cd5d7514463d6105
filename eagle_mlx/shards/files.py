"""Files of a folder of shards: written whole or not at all, checked against their checksum, one writer at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from eagle_mlx.errors import OutputError

from .format import Sample, ShardFile, ShardMeta, encode, shard_name

PART = ".part"
"""The end of a file's name while it is being written."""


def write_shard(folder: Path, index: int, samples: Sequence[Sample], meta: ShardMeta) -> ShardFile:
    """Write one shard and return its line of the manifest, when the file is on the disk."""
    data, name = encode(samples, meta), shard_name(index)
    write_whole(folder / name, data)
    return ShardFile(
        name,
        hashlib.sha256(data).hexdigest(),
        len(data),
        len(samples),
        sum(len(s.tokens) for s in samples),
        sum(int(s.loss_mask.sum()) for s in samples),
    )


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, even after a power cut. Raises OSError."""
    part = path.with_name(path.name + PART)
    try:
        with part.open("wb") as file:
            file.write(data)
            sync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def remove_parts(folder: Path) -> None:
    """Remove what an interrupted write has left."""
    for part in folder.glob(f"*{PART}"):
        part.unlink()


def fault(path: Path, entry: ShardFile) -> str | None:
    """What is wrong with a file, in words that follow its name; None where it is the one of the manifest."""
    try:
        size = path.stat().st_size
        if size != entry.size:
            what = "cut short" if size < entry.size else "longer than it was"
            return f"is {what}: {size:,} bytes in place of {entry.size:,}"
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "is missing, but the manifest lists it"
    except OSError as e:
        return f"cannot be read: {e.strerror}"
    return None if digest == entry.sha256 else "is damaged: its SHA-256 is not the one in the manifest"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other writers out of a folder within the block; the lock goes with the process, however that ends.

    Raises OutputError where another one writes there. A file system without locks is taken on trust.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(descriptor)
            raise OutputError(f"another process is writing to {folder}; wait until it has ended") from e
    try:
        yield
    finally:
        os.close(descriptor)
