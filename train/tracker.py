"""What a run reports while it goes: metrics.jsonl always, Weights & Biases where it is asked for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from .config import TrainConfig
from .metrics import METRICS, Row, cut_back

Kind = Literal["train", "eval"]


class Tracker:
    """Writes lines of metrics; use it in a `with` statement.

    With `resume_step` the folder is that of a run which goes on after that step: lines of later steps are dropped, and
    each step is written once however often it is logged. Raises DataError where the lines that are there are damaged.
    """

    def __init__(self, folder: Path, config: TrainConfig, resume_step: int | None = None):
        file = folder / METRICS
        self.rows: list[Row] = [] if resume_step is None else cut_back(file, resume_step)
        """All lines so far, those of before an interruption included."""
        self._known = {(row["kind"], row["step"]) for row in self.rows}
        self._file = file.open("w" if resume_step is None else "a", encoding="utf-8")
        self._wandb: Any = None
        if config.wandb:
            import wandb

            self._wandb = wandb.init(project=config.wandb_project, config=dataclasses.asdict(config), dir=str(folder))

    def log(self, kind: Kind, step: int, values: Mapping[str, Any]) -> None:
        """Add a line: its kind, the step after which it was taken, and the values."""
        if (kind, step) in self._known:
            return
        row = {"kind": kind, "step": step, **values}
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log(flatten(kind, values), step=step)

    def summarize(self, values: Mapping[str, Any]) -> None:
        """What the run came to."""
        if self._wandb is not None:
            self._wandb.summary.update(flatten("final", values))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if error is None else 1)


def flatten(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a": [x, y]}` as `{"prefix/a/0": x, "prefix/a/1": y}`, which W&B can draw."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}/{name}"
        if isinstance(value, Mapping):
            flat |= flatten(key, value)
        elif isinstance(value, list):
            flat |= {f"{key}/{i}": item for i, item in enumerate(value)}
        else:
            flat[key] = value
    return flat
