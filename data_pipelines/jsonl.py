"""Write files of conversations: a file appears only once it is complete, and partial files survive interruptions."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from eagle_mlx.errors import DataError, OutputError
from eagle_mlx.files import check_file, locked, write_whole

from .conversation import Conversation

GZ = ".gz"
NAMED = "target_name"
"""The setting that names the target in errors; it may change, since a hash tells targets apart."""
_FORMAT = 2


def check_new(path: str | Path, overwrite: bool = False) -> Path:
    """Return the path. Raises OutputError if it cannot be written or would replace a file without `overwrite`."""
    path = Path(path)
    if path.is_file() and not overwrite:
        raise OutputError(f"{path} exists already; name another output file, or replace it with --overwrite")
    check_file(path)
    return path


def as_line(conversation: Conversation, **more: str) -> bytes:
    """Return a line of JSON with the keys of `more`; text that UTF-8 cannot encode (lone surrogates) is escaped."""
    row = {**conversation.as_row(), **more}
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(row).encode() + b"\n"


class Done(NamedTuple):
    """A row that is already in the partial file."""

    key: int
    counts: dict[str, int]
    """Additions of the row to the report's counts, by name."""
    row: bytes
    """A line with its line end; empty if the conversation was dropped."""


@dataclass
class PartialFile:
    """`NAME.partial`, next to the output file: a line of settings, then a line for each row, in any order.

    A row's line is `[index, key, crc32, {name: count}]`, a tab and the row's text. No row is lost if the process dies;
    a power failure may lose those that the system has not written yet.
    """

    path: Path
    output: Path
    overwrite: bool
    done: dict[int, Done]
    _file: BinaryIO

    def check(self, index: int, key: int, origin: str) -> bool:
        """Return whether the row is done. Raises DataError if it was made from another conversation."""
        done = self.done.get(index)
        if done is not None and done.key != key:
            raise self._changed(f"{origin} is not the conversation that was there when {self.path} was started")
        return done is not None

    def add(self, index: int, key: int, counts: dict[str, int], row: bytes) -> None:
        """Write a row: a line with its line end, or nothing. Raises OSError, for `open_partial` to report."""
        head = json.dumps([index, key, zlib.crc32(row), counts]).encode()
        self._file.write(head + b"\t" + (row or b"\n"))
        self._file.flush()
        self.done[index] = Done(key, counts, row)

    def finish(self, total: int) -> int:
        """Write the rows in order and return their number. Raises DataError for rows beyond `total`."""
        if (last := max(self.done, default=-1)) >= total:
            raise self._changed(f"{self.path} holds row {last + 1}, but the data now has only {total} conversations")
        return self.finish_with(sorted(self.done))

    def finish_with(self, indexes: Iterable[int]) -> int:
        """Write only these rows, in this order, as `finish` does: all or nothing, compressed for .gz."""
        rows = [row for index in indexes if (row := self.done[index].row)]
        check_new(self.output, self.overwrite)  # another process may have written it
        # Without a timestamp, equal rows give equal bytes.
        data = gzip.compress(b"".join(rows), mtime=0) if self.output.suffix == GZ else b"".join(rows)
        write_whole(self.output, data)
        self.path.unlink()
        return len(rows)

    def _changed(self, what: str) -> DataError:
        return DataError(f"{what}: the data has changed; restore it to continue, or delete {self.path} to start over")


def partial_path(output: str | Path) -> Path:
    return Path(f"{output}.partial")


@contextmanager
def open_partial(output: str | Path, settings: Mapping[str, Any], overwrite: bool = False) -> Iterator[PartialFile]:
    """Open an output's partial file, or create it; it is kept if the block fails.

    `settings` has everything that the rows depend on. Raises OutputError if the output exists and `overwrite` is not
    set, if the partial file has other settings, if another process is writing it, or if writing fails.
    """
    output = check_new(output, overwrite)
    path = partial_path(output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file, locked(path):
            yield PartialFile(path, output, overwrite, _read(file, path, settings), file)
    except KeyboardInterrupt as e:
        e.args = (f"finished rows are in {path}, and the same command continues with it",)
        raise
    except OSError as e:
        raise OutputError(
            f"{output} could not be written: {e.strerror or e}; finished rows are kept in {path}, and the same command "
            "continues"
        ) from e


def _read(file: BinaryIO, path: Path, settings: Mapping[str, Any]) -> dict[int, Done]:
    """Return the rows up to the first damaged one, and truncate the file there. A new file gets its first line."""
    file.seek(0)
    done: dict[int, Done] = {}
    end = 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        if end == 0:
            _compare(line, path, settings)
        elif not _add_row(line, done):
            break
        end += len(line)
    file.truncate(end)
    file.seek(end)
    if end == 0:
        head = {"partial": _FORMAT, "settings": settings}
        file.write(json.dumps(head, ensure_ascii=False).encode(errors="replace") + b"\n")
        file.flush()
    return done


def _add_row(line: bytes, done: dict[int, Done]) -> bool:
    """Parse a row's line and add it; return False if the line is damaged."""
    head, _, row = line.partition(b"\t")
    row = b"" if row == b"\n" else row
    try:
        index, key, crc, counts = json.loads(head)
    except (ValueError, TypeError):
        return False
    if zlib.crc32(row) != crc:
        return False
    done[index] = Done(key, counts, row)
    return True


def _compare(line: bytes, path: Path, settings: Mapping[str, Any]) -> None:
    try:
        head = json.loads(line)
        begun = dict(head["settings"]) if head["partial"] == _FORMAT else None
    except (ValueError, TypeError, KeyError):
        begun = None
    if begun is None:
        raise OutputError(f"{path} was not started by this version of this command; move it away")
    if wrong := difference(begun, settings):
        raise OutputError(
            f"{path} was started with {wrong}; continue with the same options, or delete it to start over"
        )


def difference(begun: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return the first setting that differs from the ones read from a file, such as `seed 3, not 5`, or ""."""
    now = json.loads(json.dumps(settings))
    for name in sorted((begun.keys() | now.keys()) - {NAMED}):
        if begun.get(name) != now.get(name):
            change = f"{name} {_shown(name, begun)}, not {_shown(name, now)}"
            return change if len(change) < 300 else f"other {name}"
    return ""


def _shown(name: str, settings: Mapping[str, Any]) -> str:
    label = f"{settings[NAMED]} " if name == "target" and NAMED in settings else ""
    return f"{label}{settings.get(name)!r}"
