"""Output folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from eagle_mlx.errors import OutputError


def check_free(folder: str | Path, overwrite: bool = False) -> Path:
    """The folder as a path, after making sure that writing it later will lose nothing.

    Raises OutputError where it exists and `overwrite` is not set, or where its name is taken by a file.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise OutputError(f"{path} is a file; name a folder that does not exist yet")
    if path.exists() and not overwrite and any(path.iterdir()):
        raise OutputError(f"{path} exists already; name another output folder, or overwrite it with --overwrite")
    return path


@contextlib.contextmanager
def new_folder(folder: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name when the block ends, and vanishes when the block fails.

    Files are flushed to the disk before the rename. What stood at `folder` before goes away only after that. Raises
    OutputError where the folder exists and `overwrite` is not set, and for a full disk or a place without permission.
    """
    path = check_free(folder, overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as e:
        raise OutputError(f"{path} cannot be made: {e.strerror or e}") from e
    try:
        yield part
        _flush(part)
        part.chmod(0o755)
        swap(part, path)
    except OSError as e:
        raise OutputError(f"{path} could not be written: {e.strerror or e}; nothing was left behind") from e
    finally:
        shutil.rmtree(part, ignore_errors=True)


def swap(part: Path, path: Path) -> None:
    """Rename `part` to `path`; a folder already there is deleted only once the new one has its name."""
    if not path.exists():
        part.rename(path)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
    path.rename(aside)
    try:
        part.rename(path)
    except OSError:
        aside.rename(path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _flush(folder: Path) -> None:
    for entry in (*folder.rglob("*"), folder):
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
