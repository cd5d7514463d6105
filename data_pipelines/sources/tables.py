"""Read rows of local files, folders and the hub's data sets through `datasets`."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from eagle_mlx.errors import DataError

from ..jsonl import GZ
from .rows import SHAPES
from .spec import Source

Row = dict[str, Any]
Check = Callable[[Row, str], object]
"""Raises DataError, with the origin, if a row is unusable."""


def open_rows(source: Source, check: Check | None) -> tuple[int, Callable[[int], Row]]:
    """Open a file, a folder or a data set of the hub; return the number of rows, and a function that reads one.

    With a check, all rows of a JSON file are checked first, so that errors do not appear hours later. Raises DataError,
    with the line number for JSON lines, if the source is missing, empty or malformed.
    """
    if source.kind != "file":
        return _table(_load(source, source.name))
    path = _existing(Path(source.name))
    if path.suffix == ".parquet":
        return _table(_load(source, "parquet"))
    if _is_list(path):
        listed = _listed(path)
        if check is not None:
            for number, row in enumerate(listed, 1):
                check(row, f"{path}:{number}")
        return len(listed), listed.__getitem__
    if check is not None:
        for origin, line in _numbered(path):
            check(_object(line, origin), origin)
    if path.suffix == GZ:
        lines = [line for _, line in _numbered(path)]  # in memory, because a gzip file has no random access
        return len(lines), lambda index: _object(lines[index], f"{path}:{index + 1}")
    # Lines stay text, since Arrow tables of nested rows would mix the rows' keys. Latin-1 keeps every byte, so an error
    # in UTF-8 is reported with its line number.
    rows = _load(source, "text", encoding="latin-1")
    return len(rows), lambda index: _object(rows[index]["text"].encode("latin-1"), f"{path}:{index + 1}")


def _table(rows: Any) -> tuple[int, Callable[[int], Row]]:
    return len(rows), lambda index: _without_nulls(rows[index])


def stream_rows(source: Source) -> list[Callable[[], Iterator[tuple[str, Row | bytes]]]]:
    """Return the parts of a source. Each is a function that yields (origin, row) in order without storing rows.

    A row of JSON lines is the line's bytes, for `decoded`.

    Raises DataError if there is no such source.
    """
    if source.kind != "file":
        return _parts(source, _load(source, source.name, streaming=True))
    path = _existing(Path(source.name))
    if _is_list(path):
        raise DataError(f"{path} is one list, which cannot be streamed: leave out --stream, or convert it to jsonl")
    if path.suffix == ".parquet":
        return _parts(source, _load(source, "parquet", streaming=True))
    return [partial(_numbered, path)]


def decoded(row: Row | bytes, origin: str) -> Row:
    """Decode a streamed row. Raises DataError, with the line number, if it is not a JSON object."""
    return _object(row, origin) if isinstance(row, bytes) else _without_nulls(row)


def _numbered(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of a file with their origins. Raises DataError if it cannot be read."""
    try:
        with gzip.open(path, "rb") if path.suffix == GZ else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield f"{path}:{number}", line
    except (OSError, EOFError, zlib.error) as e:
        raise DataError(f"{path} cannot be read: {e}") from e


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _parts(source: Source, found: Any) -> list[Callable[[], Iterator[tuple[str, Row | bytes]]]]:
    """Return one part for each file of a streamed data set."""
    count = found.num_shards

    def rows(number: int) -> Iterator[tuple[str, Row | bytes]]:
        place = f"{source.spec}:part {number + 1}:" if count > 1 else f"{source.spec}:"
        try:
            for index, row in enumerate(found.shard(num_shards=count, index=number), 1):
                yield f"{place}{index}", row
        except Exception as e:  # from the network or any reader
            raise DataError(f"{source.spec}: the stream ended early: {_cause(e)}; start again") from e

    return [partial(rows, number) for number in range(count)]


def _existing(path: Path) -> Path:
    if path.is_dir():
        raise DataError(f"{path} is a folder; name the files in it")
    if not path.exists():
        raise DataError(f"there is no file {path}")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; each row must be one of\n{SHAPES}")
    return path


def _load(source: Source, reader: str, streaming: bool = False, encoding: str | None = None) -> Any:
    import datasets  # slow, so only if needed

    datasets.disable_progress_bars()
    options: dict[str, Any] = {"streaming": streaming, **({"encoding": encoding} if encoding else {})}
    if source.kind == "file":
        options |= {"data_files": source.name, "split": "train"}
    else:
        options |= {"name": source.config, "split": source.split}
    if source.files is not None and source.kind == "hub":
        options["data_files"] = source.files
    try:
        return datasets.load_dataset(reader, **options)
    except Exception as e:  # from the network, the hub or any reader in `datasets`
        raise DataError(_failure(source, _cause(e))) from e


def _failure(source: Source, cause: str) -> str:
    if source.kind == "file":
        return f"{source.name} cannot be read as {Path(source.name).suffix[1:]}: {cause}"
    if source.kind == "folder":
        advice = f"for its text files, name text:{source.name}"
        return f"{source.spec}: {source.split!r} of the folder {source.name} cannot be read: {cause}; {advice}"
    if "disk space" in cause:
        return f"{source.spec}: {cause}; use --stream to read it without storing it"
    missing, advice = "there is no such file, and ", ""
    if source.spec.startswith("preset:"):
        missing, advice = "", f"; if you have a copy, name it as {source.spec}@PLACE"
    return (
        f"{source.spec}: {missing}the data set {source.name} ({source.split!r}) cannot be loaded "
        f"from the hub: {cause}{advice}"
    )


def _is_list(path: Path) -> bool:
    """Return whether a file is one JSON list instead of JSON lines. Only a .json file may be."""
    if path.suffix != ".json":
        return False
    with path.open("rb") as file:
        return file.read(1024).lstrip()[:1] == b"["


def _listed(path: Path) -> list[Row]:
    try:
        rows: list[Row] = json.loads(path.read_bytes())
    except ValueError as e:
        raise DataError(f"{path} is not valid JSON: {e}") from e
    if not rows:
        raise DataError(f"{path} is an empty list; each row must be one of\n{SHAPES}")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: a row must be an object, not {type(row).__name__}")
    return rows


def _object(line: bytes, origin: str) -> Row:
    text = line.strip()
    if not text:
        raise DataError(f"{origin}: the line is empty; remove it, since every line must be a row")
    if b"\r" in text:
        raise DataError(f"{origin}: the line has a carriage return in it; write it as \\r, or remove it")
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
