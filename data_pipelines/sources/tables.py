"""Read rows of local files, folders and the hub's data sets through `datasets`."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from eagle_mlx.errors import DataError

from ..jsonl import GZ
from .rows import SHAPES
from .spec import Source

Row = dict[str, Any]
Check = Callable[[Row, str], object]
"""Raises DataError, with the origin, if a row is unusable."""


class Rows(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Row: ...


def open_rows(source: Source, check: Check | None) -> Rows:
    """Open a file, a folder or a data set of the hub for random access by row.

    With a check, all rows of a JSON file are checked first, so that errors do not appear hours later. Raises DataError,
    with the line number for JSON lines, if the source is missing, empty or malformed.
    """
    if source.kind != "file":
        return _Table(_load_set(source))
    path = _existing(Path(source.name))
    if check is not None and path.suffix != ".parquet":
        _check_json(path, check)
    if _is_list(path):
        return _listed(path.read_bytes(), path)
    if path.suffix == GZ:
        lines = list(_lines_of(path))  # in memory, because a gzip file has no random access
        return _Lines(path, lines.__getitem__, len(lines))
    options: dict[str, Any] = {"data_files": str(path), "split": "train"}
    if path.suffix == ".parquet":
        return _Table(_load(source, options, "parquet"))
    # Latin-1 keeps every byte, so an error in UTF-8 is reported with its line number.
    rows = _load(source, {**options, "encoding": "latin-1"}, "text")
    return _Lines(path, lambda index: rows[index]["text"].encode("latin-1"), len(rows))


def stream_rows(source: Source) -> list[Callable[[], Iterator[tuple[str, Row]]]]:
    """Return the parts of a source. Each is a function that yields (origin, row) in order without storing rows.

    Raises DataError if there is no such source.
    """
    if source.kind != "file":
        return _parts(source, _load_set(source, streaming=True))
    path = _existing(Path(source.name))
    if _is_list(path):
        raise DataError(f"{path} holds one list, which can only be read whole: leave --stream out, or write jsonl")
    if path.suffix == ".parquet":
        found = _load(source, {"data_files": str(path), "split": "train", "streaming": True}, "parquet")
        return _parts(source, found)

    def lines() -> Iterator[tuple[str, Row]]:
        for number, line in enumerate(_lines_of(path), 1):
            yield f"{path}:{number}", {_LINE: line}

    return [lines]


_LINE = "\0line"
"""Key of a line that is not decoded yet."""


def decoded(row: Row, origin: str) -> Row:
    """Decode a streamed row. Raises DataError, with the line number, if it is not a JSON object."""
    return _object(row[_LINE], origin) if _LINE in row else _without_nulls(row)


class _Table:
    """Rows of Arrow tables, without the nulls that Arrow adds for missing keys."""

    def __init__(self, rows: Rows):
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row: Row = _without_nulls(self._rows[index])
        return row


def _lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file. Raises DataError if it cannot be read."""
    try:
        with gzip.open(path, "rb") if path.suffix == GZ else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as e:
        raise DataError(f"{path} cannot be read: {e}") from e


class _Lines:
    """JSON lines. They are kept as text, since Arrow tables of nested rows would mix the rows' keys."""

    def __init__(self, path: Path, line: Callable[[int], bytes], count: int):
        self._path, self._line, self._count = path, line, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Row:
        return _object(self._line(index), f"{self._path}:{index + 1}")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _parts(source: Source, found: Any) -> list[Callable[[], Iterator[tuple[str, Row]]]]:
    """Return one part for each file of a streamed data set."""
    count = found.num_shards

    def part(number: int) -> Callable[[], Iterator[tuple[str, Row]]]:
        def rows() -> Iterator[tuple[str, Row]]:
            place = f"{source.spec}:part {number + 1}:" if count > 1 else f"{source.spec}:"
            try:
                for index, row in enumerate(found.shard(num_shards=count, index=number), 1):
                    yield f"{place}{index}", row
            except DataError:
                raise
            except Exception as e:  # from the network or any reader
                raise DataError(f"{source.spec}: the stream broke off: {_cause(e)}; start again") from e

        return rows

    return [part(number) for number in range(count)]


def _existing(path: Path) -> Path:
    if path.is_dir():
        raise DataError(f"{path} is a folder; name the files in it")
    if not path.exists():
        raise DataError(f"there is no file {path}")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; a row is one of\n{SHAPES}")
    return path


def _load_set(source: Source, streaming: bool = False) -> Any:
    options: dict[str, Any] = {"name": source.config, "split": source.split, "streaming": streaming}
    if source.files is not None and source.kind == "hub":
        options["data_files"] = source.files
    return _load(source, options, source.name)


def _load(source: Source, options: dict[str, Any], reader: str) -> Any:
    with _quiet() as library:
        try:
            return library.load_dataset(reader, **options)
        except Exception as e:  # from the network, the hub or any reader in `datasets`
            raise DataError(_failure(source, _cause(e))) from e


def _failure(source: Source, cause: str) -> str:
    if source.kind == "file":
        return f"{source.name} cannot be read as {Path(source.name).suffix[1:]}: {cause}"
    if source.kind == "folder":
        return f"{source.spec}: {source.split!r} of the folder {source.name} cannot be read: {cause}"
    if "disk space" in cause:
        return f"{source.spec}: {cause}; --stream reads it without storing it"
    missing = "" if source.spec.startswith("preset:") else "there is no such file, and "
    advice = f"; with a copy on this machine, give {source.spec}@PLACE" if source.spec.startswith("preset:") else ""
    return (
        f"{source.spec}: {missing}{source.split!r} of the data set {source.name} cannot be had from the hub: "
        f"{cause}{advice}"
    )


def _is_list(path: Path) -> bool:
    """Return whether a file is one JSON list instead of JSON lines. Only a .json file may be."""
    if path.suffix != ".json":
        return False
    with path.open("rb") as file:
        return file.read(1024).lstrip()[:1] == b"["


def _check_json(path: Path, check: Check) -> None:
    if _is_list(path):
        for number, row in enumerate(_listed(path.read_bytes(), path), 1):
            check(row, f"{path}:{number}")
        return
    for number, line in enumerate(_lines_of(path), 1):
        check(_object(line, f"{path}:{number}"), f"{path}:{number}")


def _listed(data: bytes, path: Path) -> Sequence[Row]:
    try:
        rows: list[Any] = json.loads(data)
    except ValueError as e:
        raise DataError(f"{path} is not valid JSON: {e}") from e
    if not rows:
        raise DataError(f"{path} holds an empty list; a row is one of\n{SHAPES}")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: a row must be an object, not {type(row).__name__}")
    return rows


def _object(line: bytes, origin: str) -> Row:
    text = line.strip()
    if not text:
        raise DataError(f"{origin}: an empty line; every line must hold one row, so remove it")
    if b"\r" in text:
        raise DataError(f"{origin}: a carriage return within the line; write it as \\r, or remove it")
    try:
        row = json.loads(text)
    except json.JSONDecodeError as e:
        raise DataError(f"{origin}: not valid JSON: {e.msg} at column {e.colno}") from e
    except UnicodeDecodeError as e:
        raise DataError(f"{origin}: not UTF-8: {e.reason} at byte {e.start}") from e
    if not isinstance(row, dict):
        raise DataError(f"{origin}: a row must be an object, not {type(row).__name__}")
    return row


def _cause(error: BaseException) -> str:
    """Return the innermost error message."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}"


@contextmanager
def _quiet() -> Iterator[Any]:
    """Import `datasets` (slow, so only if needed) and yield it with progress bars disabled."""
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield datasets
    finally:
        if shown:
            datasets.enable_progress_bars()
