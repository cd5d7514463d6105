"""The lines of metrics.jsonl: reading them, and cutting them back to a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle_mlx.errors import DataError
from eagle_mlx.files import write_whole

METRICS = "metrics.jsonl"
Row = dict[str, Any]
"""A line: its `kind` (train or eval), the `step` after which it was taken, and the values."""


def read_rows(file: Path) -> list[Row]:
    """All lines of a run, without a last one that was only half written.

    Raises DataError that names the line where another one is no line of metrics.
    """
    *lines, rest = file.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = [_row(line) for line in lines]
    if None in rows:
        raise DataError(f"{file}:{rows.index(None) + 1} is no line of metrics; take the line out")
    rows.append(_row(rest))
    return [row for row in rows if row is not None]


def truncate(file: Path, step: int) -> list[Row]:
    """Drop what the file holds of later steps, and a half-written line; returns the rest. The file is replaced whole.

    Raises DataError as `read_rows` does. A file that is not there counts as an empty one.
    """
    rows = [row for row in read_rows(file) if row["step"] <= step] if file.exists() else []
    write_whole(file, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return rows


def _row(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(row, dict) and isinstance(row.get("kind"), str) and isinstance(row.get("step"), int)
    return row if whole else None
