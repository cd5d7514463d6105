"""Read rows of local files, folders and the hub's data sets, and pieces of plain text."""

from __future__ import annotations

import gzip
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from eagle_mlx.errors import DataError
from eagle_mlx.extras import require

from ..conversation import Conversation
from ..jsonl import GZ
from .rows import SHAPES
from .spec import Source

Row = dict[str, Any]
Found = tuple[str, object]
"""A row, or its JSON as bytes, after its origin."""
PIECE_CHARS = 1500
"""Characters of a piece of text, about 400 tokens."""
_HEAD = 8000
"""A file with a zero byte in its first 8,000 bytes is binary, as for git."""


def open_rows(source: Source) -> tuple[int, Callable[[int], Found]]:
    """Return the number of rows, and a function that reads one. Raises DataError if there are none to read."""
    if is_table(source):
        rows = _load(source)
        return len(rows), lambda index: (f"{source.spec}:{index + 1}", _without_nulls(rows[index]))
    found = list(_json_rows(source))
    return len(found), found.__getitem__


def stream_rows(source: Source) -> list[Callable[[], Iterator[Found]]]:
    """Return the parts of a source: functions that yield rows in order without storing them. May raise DataError."""
    if not is_table(source):
        return [partial(_json_rows, source)]
    found = _load(source, streaming=True)
    return [partial(_shard, source, found, number) for number in range(found.num_shards)]


def few_rows(source: Source, most: int) -> list[Found]:
    """Return the rows of a source that has at most `most`; empty if it has more. May raise DataError."""
    if is_table(source):
        count, read = open_rows(source)
        return list(map(read, range(count))) if count <= most else []
    rows = list(islice(_json_rows(source), most + 1))
    return rows if len(rows) <= most else []


def is_table(source: Source) -> bool:
    """Return whether `datasets` reads the source. We read JSON, for errors with line numbers."""
    return source.kind != "file" or source.name.endswith(".parquet")


def decoded(row: object, origin: str) -> Row:
    """Return a row that may still be JSON. Raises DataError if it is not a JSON object."""
    row = _parsed(row, origin) if isinstance(row, bytes) else row
    if not isinstance(row, dict):
        raise DataError(f"{origin}: a row must be an object, not {type(row).__name__}")
    return row


def _json_rows(source: Source) -> Iterator[Found]:
    """Yield the lines of a file, or the items of a .json file that is one list. Raises DataError."""
    path = _existing(Path(source.name))
    try:
        with gzip.open(path, "rb") if path.suffix == GZ else path.open("rb") as file:
            start = file.read(1024).removeprefix(BOM_UTF8).lstrip()
            is_list = path.suffix == ".json" and start[:1] == b"["
            file.seek(0)
            for number, row in enumerate(_items(file.read(), path) if is_list else file, 1):
                yield f"{source.spec}:{number}", row
    except (OSError, EOFError, zlib.error) as e:
        raise DataError(f"{path} cannot be read: {e}") from e


def _items(text: bytes, path: Path) -> list[object]:
    try:
        items: list[object] = json.loads(text)
    except ValueError as e:
        raise DataError(f"{path} is not valid JSON: {e}") from e
    if not items:
        raise DataError(f"{path} is an empty list; each row must be one of\n{SHAPES}")
    return items


def _without_nulls(value: Any) -> Any:
    """Return a row without the nulls that a table adds."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _shard(source: Source, found: Any, number: int) -> Iterator[Found]:
    count = found.num_shards
    place = f"{source.spec}:part {number + 1}:" if count > 1 else f"{source.spec}:"
    try:
        for index, row in enumerate(found.shard(num_shards=count, index=number), 1):
            yield f"{place}{index}", _without_nulls(row)
    except Exception as e:  # from the network or any reader
        raise DataError(f"{source.spec}: the stream ended early: {_cause(e)}; start again") from e


def _existing(path: Path) -> Path:
    if path.is_dir():
        raise DataError(f"{path} is a folder; name the files in it")
    if not path.exists():
        raise DataError(f"there is no file {path}")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; each row must be one of\n{SHAPES}")
    return path


def _load(source: Source, streaming: bool = False) -> Any:
    require(source.spec, "datasets")
    import datasets  # slow, so only if needed

    datasets.disable_progress_bars()
    options: dict[str, Any] = {"streaming": streaming, "split": source.split}
    if source.kind == "file":
        options["data_files"] = str(_existing(Path(source.name)))
    else:
        options["name"] = source.config
        if source.files is not None:
            options["data_files"] = source.files
    try:
        return datasets.load_dataset("parquet" if source.kind == "file" else source.name, **options)
    except Exception as e:  # from the network, the hub or any reader in `datasets`
        raise DataError(_failure(source, _cause(e))) from e


def _failure(source: Source, cause: str) -> str:
    if source.kind == "file":
        return f"{source.name} cannot be read as {Path(source.name).suffix[1:]}: {cause}"
    if "disk space" in cause:
        return f"{source.spec}: {cause}; use --stream to read it without storing it"
    if source.kind == "folder":
        how, advice = "read", f"for its text files, name text:{source.name}"
    elif source.spec.startswith("preset:"):
        how, advice = "loaded from the hub", f"if you have a copy, name it as {source.spec}@PLACE"
    else:
        how, advice = "loaded from the hub", "there is no such file either"
    return f"{source.spec}: {source.name} ({source.split!r}) cannot be {how}: {cause}; {advice}"


def _parsed(line: bytes, origin: str) -> object:
    text = line.strip()
    if not text:
        raise DataError(f"{origin}: the line is empty; remove it, since every line must be a row")
    if b"\r" in text:
        raise DataError(f"{origin}: the line has a carriage return in it; write it as \\r, or remove it")
    try:
        return json.loads(text)
    except json.JSONDecodeError as e:
        raise DataError(f"{origin}: not valid JSON: {e.msg} at column {e.colno}") from e
    except UnicodeDecodeError as e:
        raise DataError(f"{origin}: not UTF-8: {e.reason} at byte {e.start}") from e


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}"


def text_files(place: Path) -> list[Callable[[], Iterator[Conversation]]]:
    """Return a function for each text file at or under `place` that yields its pieces.

    Hidden files, and files in a folder that are not text in UTF-8, are skipped. Raises DataError, now or while reading,
    if there is nothing, or if a file cannot be read.
    """
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
            held = opened.read(_HEAD)
            text = "" if b"\0" in held else (held + opened.read()).decode()
    except OSError as e:
        raise DataError(f"{file} cannot be read: {e.strerror}; make it readable, or name a folder without it") from e
    except UnicodeDecodeError:
        text = ""
    if alone and not text.strip():
        raise DataError(f"{file} is empty, or not text in UTF-8; convert it, or name another file")
    yield from pieces(text, str(file))


def pieces(text: str, origin: str) -> Iterator[Conversation]:
    """Yield pieces of about `PIECE_CHARS`, cut at line ends if lines are not longer."""
    piece, first = "", 1
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        for start in range(0, len(line), PIECE_CHARS):
            part = line[start : start + PIECE_CHARS]
            if len(piece) + len(part) > PIECE_CHARS:
                yield from _piece(piece, f"{origin}:{first}")
                piece, first = "", number
            piece += part
    yield from _piece(piece, f"{origin}:{first}")


def _piece(text: str, origin: str) -> list[Conversation]:
    return [Conversation(text=text, origin=origin)] if text.strip() else []
