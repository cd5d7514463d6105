"""Files of conversations: they appear whole or not at all, and a file in the making survives any interruption."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import IO, Any, BinaryIO, NamedTuple, cast

from eagle_mlx.errors import DataError, OutputError
from eagle_mlx.files import check_writable, locked

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


def _written(file: BinaryIO, path: Path) -> AbstractContextManager[IO[bytes]]:
    """What lines are written to: the file, or what compresses into it, without a time, so that same is same."""
    if path.suffix != GZ:
        return nullcontext(file)
    return cast(AbstractContextManager[IO[bytes]], gzip.GzipFile("", "wb", fileobj=file, mtime=0))


def write_lines(path: str | Path, lines: Iterable[bytes], overwrite: bool = False) -> int:
    """Write rows and return their number; the file appears when the last one is on the disk.

    It is compressed if its name ends in .gz. Raises OutputError if the file exists or cannot be written; then nothing
    is left behind.
    """
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


_FORMAT = 1
FLUSH_SECONDS = 5.0
"""Rows reach the disk itself this often, for when the power goes; a process that dies loses none that was added."""


class Done(NamedTuple):
    """A row that is in the file."""

    key: int
    """Of the conversation that it was made from."""
    counts: tuple[int, ...]
    """What the row adds to the report."""
    at: int
    """Where its text begins in the file."""
    size: int
    """Bytes of its text; 0 for a conversation of which nothing was left."""


@dataclass
class PartialFile:
    """`NAME.partial`, beside the file that it becomes: a line of settings, then a line for each row, in any order.

    A row's line is `[index, key, crc32, counts…]`, a tab and the row as it will stand in the file. Its name is not one
    that data is read from, and its lines are no rows.
    """

    path: Path
    output: Path
    done: dict[int, Done]
    """By the row's number in the file."""
    _file: BinaryIO
    _flushed: float

    def check(self, index: int, key: int, origin: str) -> bool:
        """Whether the row is done. Raises DataError where it was made from something else."""
        found = self.done.get(index)
        if found is not None and found.key != key:
            raise DataError(
                f"{origin} is not the conversation that stood there when {self.path} was begun: the data has changed; "
                f"bring it back to continue, or delete {self.path} to begin anew"
            )
        return found is not None

    def add(self, index: int, key: int, counts: tuple[int, ...], row: bytes) -> None:
        """Write a row, a line with its line end or nothing. Raises OutputError where that cannot be done."""
        head = json.dumps([index, key, zlib.crc32(row), *counts]).encode()
        try:
            start = self._file.tell() + len(head) + 1
            self._file.write(head + b"\t" + (row or b"\n"))
            self._file.flush()
            if monotonic() - self._flushed > FLUSH_SECONDS:
                os.fsync(self._file.fileno())
                self._flushed = monotonic()
        except OSError as e:
            raise OutputError(
                f"{self.path} could not be written: {e.strerror or e}; what is in it stays, so make room and give the "
                "same command again"
            ) from e
        self.done[index] = Done(key, counts, start, len(row))

    def finish(self, total: int, overwrite: bool = False) -> int:
        """Write the rows in order into the output, which appears whole; the partial file goes. Returns their number.

        Raises DataError where rows are done beyond the `total` that there are now.
        """
        beyond = [index for index in self.done if index >= total]
        if beyond:
            raise DataError(
                f"{self.path} holds row {max(beyond) + 1}, but the data has only {total} conversations now: it has "
                f"changed; bring it back to continue, or delete {self.path} to begin anew"
            )
        return self.finish_with(sorted(self.done), overwrite)

    def finish_with(self, indexes: Sequence[int], overwrite: bool = False) -> int:
        """`finish` with these rows alone, in this order."""
        count = write_lines(self.output, self._rows(indexes), overwrite)
        self.path.unlink()
        return count

    def _rows(self, indexes: Sequence[int]) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            for index in indexes:
                found = self.done[index]
                if found.size:
                    file.seek(found.at)
                    yield file.read(found.size)


def partial_path(output: str | Path) -> Path:
    """Where a file in the making lies until it is whole."""
    path = Path(output)
    return path.with_name(f"{path.name}.partial")


def check_idle(output: str | Path) -> None:
    """Raise OutputError where another process is making an output now."""
    path = partial_path(output)
    if path.exists():
        with locked(path):
            pass


@contextmanager
def open_partial(output: str | Path, settings: Mapping[str, Any], overwrite: bool = False) -> Iterator[PartialFile]:
    """Continue with the partial file of an output where there is one, else begin it; it stays when the block fails.

    `settings` are all that the rows depend on. Raises OutputError where the output exists and `overwrite` is not set,
    where the partial file was begun with other settings, or where another process is writing it.
    """
    output = check_new(output, overwrite)
    path = partial_path(output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file, locked(path):
            done = _read(file, path, dict(json.loads(json.dumps(settings))))
            yield PartialFile(path, output, done, file, monotonic())
            if path.exists():
                os.fsync(file.fileno())
    except OSError as e:
        raise OutputError(f"{path} cannot be used: {e.strerror or e}") from e


def _read(file: BinaryIO, path: Path, settings: Mapping[str, Any]) -> dict[int, Done]:
    """The rows that are whole; whatever follows the last of them is cut off. A new file gets its first line."""
    file.seek(0)
    done: dict[int, Done] = {}
    end = 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        if end == 0:
            _compare(line, path, settings)
        else:
            found = _row(line, end)
            if found is None:
                break
            done[found[0]] = found[1]
        end += len(line)
    file.truncate(end)
    file.seek(end)
    if end == 0:
        head = {"partial": _FORMAT, "settings": settings}
        file.write(json.dumps(head, ensure_ascii=False).encode(errors="replace") + b"\n")
        file.flush()
    return done


def _row(line: bytes, at: int) -> tuple[int, Done] | None:
    """A line's row; None for one that is damaged."""
    head, tab, row = line.partition(b"\t")
    row = b"" if row == b"\n" else row
    try:
        index, key, crc, *counts = json.loads(head)
    except (ValueError, TypeError):
        return None
    if not tab or zlib.crc32(row) != crc:
        return None
    return index, Done(key, tuple(counts), at + len(head) + 1, len(row))


def _compare(line: bytes, path: Path, settings: Mapping[str, Any]) -> None:
    try:
        head = json.loads(line)
        begun = head["settings"] if head["partial"] == _FORMAT else None
    except (ValueError, TypeError, KeyError):
        begun = None
    if not isinstance(begun, dict):
        raise OutputError(f"{path} is no file that was begun by this version of this command; move it away")
    for name in sorted(begun.keys() | settings.keys()):
        if begun.get(name) != settings.get(name):
            raise OutputError(
                f"{path} was begun with {name} {begun.get(name)!r}, not {settings.get(name)!r}; continue with the same "
                "options, or delete it to begin anew"
            )
