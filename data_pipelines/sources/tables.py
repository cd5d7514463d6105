"""Read rows of local files, folders and the hub's data sets, and pieces of plain text."""

from __future__ import annotations

import gzip
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from eagle_mlx.errors import DataError, in_one_line
from eagle_mlx.extras import require

from ..conversation import Conversation
from ..jsonl import GZ
from . import Source
from .rows import SHAPES

RawRow = tuple[str, object]
"""An origin, and its row or the row's JSON as bytes."""
PIECE_CHARS = 1500
_HEAD = 8000
"""A file with a zero byte in its first 8,000 bytes is binary, as for git."""


def open_rows(source: Source) -> tuple[int, Callable[[int], RawRow]]:
    """Return the number of rows of a table, and a function that reads one. Raises DataError if there are none."""
    table = _load(source)
    return len(table), lambda index: (f"{source.spec}:{index + 1}", _without_nulls(table[index]))


def stream_rows(source: Source) -> list[Callable[[], Iterator[RawRow]]]:
    """Return the parts of a source: functions that yield rows in order without storing them. May raise DataError."""
    if not is_table(source):
        return [partial(json_rows, source)]
    table = _load(source, streaming=True)
    return [partial(_shard, source, table, number) for number in range(table.num_shards)]


def is_table(source: Source) -> bool:
    """Return whether `datasets` reads the source. We read JSON, for errors with line numbers."""
    return source.kind != "file" or source.name.endswith(".parquet")


def decoded(row: object, origin: str) -> dict[str, Any]:
    """Return a row that may still be JSON. Raises DataError if it is not a JSON object, or not valid Unicode."""
    row = _parsed(row, origin) if isinstance(row, bytes) else row
    if not isinstance(row, dict):
        raise DataError(f"{origin}: a row must be an object, not {type(row).__name__}")
    try:
        json.dumps(row, ensure_ascii=False, default=lambda value: None).encode()
    except UnicodeEncodeError as e:
        half = ascii(e.object[e.start])
        raise DataError(f"{origin}: not valid Unicode: {half} is half of a character; complete or remove it") from e
    return row


def json_rows(source: Source) -> Iterator[RawRow]:
    """Yield the lines of a file that are not blank, or the items of a file that is one list. Raises DataError."""
    path = _existing(Path(source.name))
    try:
        with gzip.open(path, "rb") if path.suffix == GZ else path.open("rb") as file:
            start = file.read(1024).removeprefix(BOM_UTF8).lstrip()
            if not start:
                raise _empty(path, "empty")
            file.seek(0)
            for number, row in enumerate(_items(file.read(), path) if start[:1] == b"[" else file, 1):
                if not (isinstance(row, bytes) and row.isspace()):
                    yield f"{source.spec}:{number}", row
    except (OSError, EOFError, zlib.error) as e:
        raise DataError(f"{path} cannot be read: {in_one_line(e)}") from e


def _items(text: bytes, path: Path) -> list[object]:
    try:
        items: list[object] = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{path} is not valid JSON: {e}") from e
    if not items:
        raise _empty(path, "an empty list")
    return items


def _empty(path: Path, what: str) -> DataError:
    return DataError(f"{path} is {what}; each row must be one of\n{SHAPES}")


def _without_nulls(value: Any) -> Any:
    """Return a row without the nulls that a table adds."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _shard(source: Source, table: Any, number: int) -> Iterator[RawRow]:
    count = table.num_shards
    place = f"{source.spec}:part {number + 1}:" if count > 1 else f"{source.spec}:"
    try:
        for index, row in enumerate(table.shard(num_shards=count, index=number), 1):
            yield f"{place}{index}", _without_nulls(row)
    except Exception as e:  # from the network or any reader
        raise DataError(f"{source.spec}: the stream ended early: {_cause(e)}; start again") from e


def _existing(path: Path) -> Path:
    if path.is_dir():
        raise DataError(f"{path} is a folder; name the files in it")
    if not path.exists():
        raise DataError(f"there is no file {path}")
    return path


def _load(source: Source, streaming: bool = False) -> Any:
    require(source.spec, "datasets")
    import datasets  # slow, so only if needed

    datasets.disable_progress_bars()
    path, options = source.name, {"name": source.config}
    if source.kind == "file":
        path, options = "parquet", {"data_files": str(_existing(Path(source.name)))}
    elif source.files is not None:
        options["data_files"] = source.files
    try:
        return datasets.load_dataset(path, streaming=streaming, split=source.split, **options)
    except Exception as e:  # from the network, the hub or any reader in `datasets`
        raise DataError(_failure(source, _cause(e))) from e


def _failure(source: Source, cause: str) -> str:
    if source.kind == "file":
        return f"{source.name} cannot be read as {Path(source.name).suffix[1:]}: {cause}"
    if "disk space" in cause:
        return f"{source.spec}: {cause}; use --stream to read it without storing it"
    what = f"{source.spec}: {source.name} ({source.split!r}) cannot be"
    if source.kind == "folder":
        return f"{what} read: {cause}; for its text files, name text:{source.name}"
    is_preset = source.spec.startswith("preset:")
    advice = f"if you have a copy, name it as {source.spec}@PLACE" if is_preset else "there is no such file either"
    return f"{what} loaded from the hub: {cause}; {advice}"


def _parsed(line: bytes, origin: str) -> object:
    text = line.strip()
    if b"\r" in text:
        raise DataError(f"{origin}: the line has a carriage return in it; write it as \\r, or remove it")
    try:
        return json.loads(text)
    except json.JSONDecodeError as e:
        why = f"{e.msg.removesuffix(' at')}; each line must be a whole object"
        raise DataError(f"{origin}: not valid JSON at column {e.colno}: {why}") from e
    except UnicodeDecodeError as e:
        raise DataError(f"{origin}: not UTF-8: {e.reason} at byte {e.start}") from e
    except (ValueError, RecursionError) as e:  # endless numbers or lists
        raise DataError(f"{origin}: not valid JSON: {e}") from e


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}"


def text_files(place: Path) -> list[Callable[[], Iterator[Conversation]]]:
    """Return a function for each text file at or under `place` that yields its pieces.

    Hidden files, and files in a folder that are not text in UTF-8, are skipped. Raises DataError, now or while reading,
    if there is nothing, or if a file cannot be read.
    """
    place = place.expanduser()
    if not place.exists():
        raise DataError(f"there is no file or folder {place}")
    if not place.is_dir():
        return [partial(_pieces_of, place, alone=True)]
    files = [file for file in sorted(place.rglob("*")) if file.is_file()]
    shown = [file for file in files if not any(part.startswith(".") for part in file.relative_to(place).parts)]
    if not shown:
        raise DataError(f"{place} has no files; name a folder with text files")
    return [partial(_pieces_of, file) for file in shown]


def _pieces_of(file: Path, alone: bool = False) -> Iterator[Conversation]:
    try:
        with file.open("rb") as opened:
            head = opened.read(_HEAD)
            text = "" if b"\0" in head else (head + opened.read()).decode("utf-8-sig")
    except OSError as e:
        raise DataError(f"{file} cannot be read: {e.strerror}; make it readable, or name a folder without it") from e
    except UnicodeDecodeError:
        text = ""
    if alone and not text.strip():
        raise DataError(f"{file} is empty, or not text in UTF-8; convert it, or name another file")
    yield from pieces(text, str(file))


def pieces(text: str, origin: str) -> Iterator[Conversation]:
    """Yield pieces of about `PIECE_CHARS`, cut at line ends if lines are not longer."""
    parts = [("", 1)]
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        for start in range(0, len(line), PIECE_CHARS):
            part, (piece, first) = line[start : start + PIECE_CHARS], parts[-1]
            if len(piece) + len(part) > PIECE_CHARS:
                parts.append((part, number))
            else:
                parts[-1] = (piece + part, first)
    return (Conversation(text=piece, origin=f"{origin}:{first}") for piece, first in parts if piece.strip())
