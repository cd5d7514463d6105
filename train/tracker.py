"""What a run reports while it goes: metrics.jsonl always, Weights & Biases where it is asked for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from .config import TrainConfig

METRICS = "metrics.jsonl"
Kind = Literal["train", "eval"]


class Tracker:
    """Writes lines of metrics; use it in a `with` statement."""

    def __init__(self, folder: Path, config: TrainConfig):
        self.rows: list[dict[str, Any]] = []
        """All lines so far."""
        self._file = (folder / METRICS).open("w", encoding="utf-8")
        self._wandb: Any = None
        if config.wandb:
            import wandb

            self._wandb = wandb.init(project=config.wandb_project, config=dataclasses.asdict(config), dir=str(folder))

    def log(self, kind: Kind, step: int, values: Mapping[str, Any]) -> None:
        """Add a line: its kind, the step after which it was taken, and the values."""
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
