"""Questions of several categories in the formats of MT-bench and Spec-Bench, and files of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROWS: list[dict[str, Any]] = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Again, shorter."]},
    {"question_id": 82, "category": "writing", "turns": ["A poem.", "A limerick."]},
    {"question_id": 83, "category": "writing", "turns": ["A letter.", "A note."]},
    {"question_id": 111, "category": "math", "turns": ["What is 2 + 2?"], "reference": ["4"]},
    {"question_id": 161, "category": "qa", "turns": ["Who?"]},
    {"question_id": 162, "category": "qa", "turns": ["Where?\u2028And when?"]},
]


def write(path: Path, *rows: object) -> Path:
    """Write a jsonl file. Text rows are written unchanged."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path
