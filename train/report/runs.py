"""Read finished and unfinished training runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_mlx.errors import DataError
from eagle_mlx.files import write_whole

_REPORT, _ABOUT, _STATES = "report.json", "run.json", "checkpoints"
_NO_SETTINGS = frozenset({"target", "head", "output", "overwrite", "wandb", "wandb_project", "init_from"})
"""Settings that are shown separately or do not affect the head."""


@dataclass(frozen=True)
class PastRun:
    """A run as described by its folder; None for unknown values."""

    folder: str
    state: str
    """`complete`, or why not."""
    target: str | None
    kind: str | None
    started_from: str | None
    steps: int
    tokens: int
    train_seconds: float
    tokens_per_second: float | None
    loss: float | None
    depth: int | None
    """Draft tokens per round in the evaluation."""
    untrained: float | None
    """τ before the first step."""
    best: float | None
    best_step: int | None
    last: float | None
    by_position: list[float]
    """Acceptance of the best head by draft position."""
    memory_gb: float | None
    """Peak memory of the process."""
    settings: Mapping[str, Any]
    rows: Sequence[Row]
    """Lines of metrics.jsonl."""

    @property
    def evaluations(self) -> list[Row]:
        return [row for row in self.rows if row["kind"] == "eval" and "acceptance_length" in row]


def read_run(folder: Path) -> PastRun:
    """Read a run. Raises DataError if the folder has no run, or if its files are damaged."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    metrics = folder / METRICS
    report, about = _json(folder / _REPORT), _json(folder / _ABOUT)
    if report is None and not metrics.exists():
        raise DataError(
            f"{folder} is not a training run: it has neither {_REPORT} nor {METRICS}; give an --output of eagle-train"
        )
    rows = read_rows(metrics) if metrics.exists() else []
    settings = dict((report or about or {}).get("config") or {})
    train = [row for row in rows if row["kind"] == "train"]
    evals = [row for row in rows if row["kind"] == "eval" and "acceptance_length" in row]
    best = max(evals, key=lambda row: float(row["acceptance_length"]), default={})
    now = rows[-1] if rows else {}
    last = evals[-1] if evals else {}
    untrained = evals[0]["acceptance_length"] if evals and evals[0]["step"] == 0 else None
    whole: Mapping[str, Any] = report or {}
    seconds = float(whole.get("train_seconds", now.get("train_seconds", 0)))
    tokens = int(whole.get("tokens", now.get("tokens", 0)))
    return PastRun(
        folder=str(folder),
        state=_state(folder, report is not None, now),
        target=whole.get("target") or settings.get("target") or None,
        kind=whole.get("kind") or settings.get("head"),
        started_from=whole.get("started_from") or settings.get("init_from") or None,
        steps=int(whole.get("steps", now.get("step", 0))),
        tokens=tokens,
        train_seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else None,
        loss=whole.get("loss", train[-1].get("loss") if train else None),
        depth=best.get("depth") or settings.get("eval_depth"),
        untrained=whole.get("untrained_acceptance_length", untrained),
        best=whole.get("acceptance_length", best.get("acceptance_length")),
        best_step=whole.get("best_step", best.get("step")),
        last=((whole.get("acceptance") or {}).get("last") or last).get("acceptance_length"),
        by_position=list(whole.get("acceptance_by_position") or best.get("acceptance_by_position") or []),
        memory_gb=max((row["memory_gb"]["process_peak"] for row in rows if "memory_gb" in row), default=None),
        settings=settings,
        rows=rows,
    )


def differing_settings(runs: Sequence[PastRun]) -> list[str]:
    """Return the names of settings that differ between runs, ignoring unknown values."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in _NO_SETTINGS)
    return [name for name in names if len({repr(run.settings[name]) for run in runs if name in run.settings}) > 1]


def _state(folder: Path, complete: bool, now: Row) -> str:
    if complete:
        return "complete"
    if any((folder / _STATES).glob("step-*")):
        return f"unfinished; eagle-train --resume {folder} continues it"
    return "unfinished" if now else "unfinished, nothing measured"


def _json(file: Path) -> dict[str, Any] | None:
    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        return values
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise DataError(f"{file} cannot be read: {e}; move it away to see the values in {METRICS}") from e


METRICS = "metrics.jsonl"
Row = dict[str, Any]
"""A line: its `kind` (train or eval), the `step` after which it was recorded, and the values."""


def read_rows(file: Path) -> list[Row]:
    """Return all lines of a run, without an incomplete last one.

    Raises DataError with the line number if another line is invalid.
    """
    *lines, rest = file.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = [_row(line) for line in lines]
    if None in rows:
        raise DataError(f"{file}:{rows.index(None) + 1} is not a line of metrics; remove the line")
    rows.append(_row(rest))
    return [row for row in rows if row is not None]


def truncate(file: Path, step: int) -> list[Row]:
    """Remove later steps and an incomplete line from the file; return the rest. The file is replaced atomically.

    Raises DataError as `read_rows` does. A missing file counts as empty.
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
