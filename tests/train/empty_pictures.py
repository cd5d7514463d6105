"""Replace a run's pictures by empty files: drawing seven takes four times as long as a tiny run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle_mlx.train.report import PICTURES, Row


def leave_empty_pictures(rows: Sequence[Row], folder: Path) -> None:
    for name in PICTURES:
        (folder / name).touch()
