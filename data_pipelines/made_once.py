"""A file of made-up conversations that is made once and found again, never taken for that of other settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_mlx.engine import Engine
from eagle_mlx.errors import OutputError
from eagle_mlx.target import Target

from .made import MakeConfig, MakeReport
from .made_file import Wanted, make_to_file, settings_of

BATCH = 32
"""Conversations that are made at once."""


def make_once(
    target: Target, config: MakeConfig, wanted: Wanted, output: str | Path, progress: bool = False
) -> MakeReport | None:
    """Make a file as `make_to_file` does, unless it is there; returns None where it is.

    What it was made from stands beside it, in `OUTPUT.from.json`. Raises OutputError, which names the difference, where
    the file is there and was made from something else; otherwise as `make_to_file`.
    """
    output = Path(output)
    if not output.exists():
        engine = Engine(target, max_batch=BATCH)
        return make_to_file(engine, config, wanted, output, progress=progress, note=note_path(output))
    _compare(output, settings_of(target, config, wanted))
    return None


def note_path(output: Path) -> Path:
    """Where it stands what a file was made from."""
    return output.with_name(f"{output.name}.from.json")


def _compare(output: Path, settings: Mapping[str, Any]) -> None:
    instead = f"move it away to have it made anew, or learn from it as it is with --data {output}"
    try:
        noted = json.loads(note_path(output).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        noted = None
    if not isinstance(noted, dict):
        raise OutputError(f"{output} exists, and nothing tells what it was made from; {instead}")
    now = json.loads(json.dumps(settings))
    for name in sorted(noted.keys() | now.keys()):
        if noted.get(name) != now.get(name):
            raise OutputError(f"{output} was made with {name} {noted.get(name)!r}, not {now.get(name)!r}; {instead}")
