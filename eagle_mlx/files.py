"""Files that are there whole or not at all, and folders that one process writes at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from eagle_mlx.errors import OutputError

PART = ".part"
"""The end of a file's name while it is being written."""


def write_whole(path: Path, data: bytes, part: Path | None = None) -> None:
    """Write a file that is there whole or not at all, even after a power cut. Raises OSError.

    `part`: the file beside it that holds the data until then; by default its name with `PART` behind it.
    """
    part = part or path.with_name(path.name + PART)
    try:
        with part.open("wb") as file:
            file.write(data)
            sync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_output(path: Path, text: str) -> None:
    """`write_whole` for a file that the user named, among files that are not ours. Raises OutputError."""
    try:
        write_whole(path, text.encode(), path.with_name(f".{path.name}.{os.getpid()}{PART}"))
    except OSError as e:
        raise OutputError(f"{path} cannot be written ({e.strerror}); name another place") from e


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
