"""Rows of local files and of the hub's data sets, read through `datasets`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from eagle_mlx.errors import DataError

from .conversation import SHAPES, parse_row

SUFFIXES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""The reader of `datasets` for each kind of file."""


class Rows(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> dict[str, Any]: ...


def open_file(path: Path) -> Rows:
    """The rows of a .jsonl, .json or .parquet file.

    Raises DataError for a file that is missing, empty or not of its kind; for jsonl with the line, and there the rows'
    shapes are checked too, so that nothing is found wrong hours later.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder; name the files in it")
    if not path.exists():
        raise DataError(f"there is no file {path}")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; a row is one of\n{SHAPES}")
    if path.suffix != ".parquet":
        _check_json(path)
    with _quiet() as library:
        try:
            rows: Rows = library.load_dataset(SUFFIXES[path.suffix], data_files=str(path), split="train")
            return rows
        except Exception as e:  # `datasets` lets the errors of every reader below it through
            raise DataError(f"{path} cannot be read as {path.suffix[1:]}: {_cause(e)}") from e


def open_hub(spec: str) -> Rows:
    """The rows of a data set of the hub, `id`, `id:split` or `id:config:split`; DataError where there is none."""
    name, *rest = spec.split(":")
    split = rest[-1] if rest else "train"
    with _quiet() as library:
        try:
            rows: Rows = library.load_dataset(name, rest[0] if len(rest) == 2 else None, split=split)
            return rows
        except Exception as e:  # the network's, the hub's and every reader's
            raise DataError(
                f"{spec}: there is no such file, and {split!r} of the data set {name} cannot be had from the hub: "
                f"{_cause(e)}"
            ) from e


def _check_json(path: Path) -> None:
    """Read a JSON file with one row a line, or (`.json` only) one list of rows, for the sake of the messages."""
    with path.open("rb") as file:
        if path.suffix == ".json" and file.read(1024).lstrip()[:1] == b"[":
            file.seek(0)
            _check_list(file.read(), path)
            return
        file.seek(0)
        for number, line in enumerate(file, 1):
            parse_row(_object(line, f"{path}:{number}"), f"{path}:{number}")


def _check_list(data: bytes, path: Path) -> None:
    try:
        rows = json.loads(data)
    except ValueError as e:
        raise DataError(f"{path} is not valid JSON: {e}") from e
    if not rows:
        raise DataError(f"{path} holds an empty list; a row is one of\n{SHAPES}")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: a row must be an object, not {type(row).__name__}")
        parse_row(row, f"{path}:{number}")


def _object(line: bytes, origin: str) -> dict[str, Any]:
    if not line.strip():
        raise DataError(f"{origin}: an empty line; every line must hold one row, so remove it")
    try:
        row = json.loads(line)
    except json.JSONDecodeError as e:
        raise DataError(f"{origin}: not valid JSON: {e.msg} at column {e.colno}") from e
    except UnicodeDecodeError as e:
        raise DataError(f"{origin}: not UTF-8: {e.reason} at byte {e.start}") from e
    if not isinstance(row, dict):
        raise DataError(f"{origin}: a row must be an object, not {type(row).__name__}")
    return row


def _cause(error: BaseException) -> str:
    """The innermost message, which is the one that says something."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}"


@contextmanager
def _quiet() -> Iterator[Any]:
    """`datasets`, imported when needed (it takes a second), without its own progress bars."""
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield datasets
    finally:
        if shown:
            datasets.enable_progress_bars()
