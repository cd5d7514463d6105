"""Files of conversations that appear whole or not at all."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, BinaryIO, cast

from eagle_mlx.errors import OutputError
from eagle_mlx.files import check_writable

from .conversation import Conversation

GZ = ".gz"
"""The end of the name of a file that is compressed."""


def check_new(path: str | Path, overwrite: bool = False) -> Path:
    """The path, after making sure that it can be written and that this loses nothing; OutputError otherwise."""
    path = Path(path)
    if path.is_dir():
        raise OutputError(f"{path} is a folder; name a file")
    if path.exists() and not overwrite:
        raise OutputError(f"{path} exists already; name another output file, or overwrite it with --overwrite")
    check_writable(path.parent)
    return path


def as_line(conversation: Conversation, **beside: str) -> bytes:
    """A conversation as a line of JSON with its line end; what UTF-8 cannot hold (half a surrogate pair) is escaped.

    `beside`: further keys of the row.
    """
    row = {**conversation.as_row(), **beside}
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(row).encode() + b"\n"


def write_jsonl(path: str | Path, conversations: Iterable[Conversation], overwrite: bool = False) -> int:
    """Write one row per conversation and return their number; the file appears when the last one is on the disk.

    Raises OutputError where the file exists or cannot be written; then nothing is left behind.
    """
    return write_lines(path, map(as_line, conversations), overwrite)


def open_lines(path: Path) -> IO[bytes]:
    """A file of lines to read, whether it is compressed or not."""
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == GZ else path.open("rb")


def _written(file: BinaryIO, path: Path) -> AbstractContextManager[IO[bytes]]:
    """What lines are written to: the file, or what compresses into it, without a time, so that same is same."""
    if path.suffix != GZ:
        return nullcontext(file)
    return cast(AbstractContextManager[IO[bytes]], gzip.GzipFile("", "wb", fileobj=file, mtime=0))


def write_lines(path: str | Path, lines: Iterable[bytes], overwrite: bool = False) -> int:
    """`write_jsonl` of rows that are bytes already, compressed where the name ends in .gz."""
    path = check_new(path, overwrite)
    count, part = 0, None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        part = Path(name)
        with os.fdopen(handle, "wb") as file:
            with _written(file, path) as inner:
                for count, line in enumerate(lines, 1):  # noqa: B007  (count is returned)
                    inner.write(line)
            file.flush()
            os.fsync(file.fileno())
        part.chmod(0o644)
        part.rename(path)
    except OSError as e:
        raise OutputError(f"{path} could not be written: {e.strerror or e}; nothing was left behind") from e
    finally:
        if part is not None:
            part.unlink(missing_ok=True)
    return count
