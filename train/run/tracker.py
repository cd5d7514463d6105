"""What a run reports: metrics.jsonl while it goes, report.json at its end, Weights & Biases if it is asked for."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import mlx.core as mx

from eagle_mlx.cpu import blas

from ..config import TrainConfig, pass_type
from ..evaluation import Acceptance, write_generations
from ..kinds import Head, kind_of
from ..report import METRICS, PICTURES, Row, truncate
from .progress import Progress
from .wandb_run import WandbRun

Kind = Literal["train", "eval"]


class Tracker:
    """Writes lines of metrics, and the texts of evaluations; use it in a `with` statement.

    With `resume_step` the folder is that of a run which resumes after that step: lines of later steps are dropped, and
    each step is written once however often it is logged. Raises DataError where the lines that are there are damaged,
    ConfigError where Weights & Biases cannot be used.
    """

    def __init__(self, folder: Path, config: TrainConfig, resume_step: int | None = None):
        file = folder / METRICS
        self.rows: list[Row] = [] if resume_step is None else truncate(file, resume_step)
        """All lines so far, those of before an interruption included."""
        self._known = {(row["kind"], row["step"]) for row in self.rows}
        self._folder, self._config = folder, config
        self._wandb = WandbRun(folder, config, resume=resume_step is not None) if config.run.wandb else None
        self._file = file.open("w" if resume_step is None else "a", encoding="utf-8")

    def log(self, kind: Kind, step: int, values: Mapping[str, Any]) -> None:
        """Add a line: its kind, the step after which it was taken, the values, and the memory taken so far.

        Where the values have a learning_rate_factor, the rates themselves are added as well.
        """
        if (kind, step) in self._known:
            return
        row = {"kind": kind, "step": step, **values, **self._rates(values), "memory_gb": memory_gb()}
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        generations = values.get("generations")
        if generations:
            write_generations(self.rows, self._folder)
        if self._wandb is not None:
            leave_out = ("kind", "step", "generations")
            self._wandb.log(kind, step, {name: value for name, value in row.items() if name not in leave_out})
            if generations:
                self._wandb.show(step, generations)

    def summarize(self, values: Mapping[str, Any]) -> None:
        """What the run came to; its plots, where they are drawn by now, go with it."""
        if self._wandb is not None:
            drawn = [self._folder / name for name in PICTURES if (self._folder / name).exists()]
            self._wandb.summarize(values, drawn)

    def _rates(self, values: Mapping[str, Any]) -> dict[str, float]:
        factor = values.get("learning_rate_factor")
        if factor is None:
            return {}
        optimization = self._config.optimization
        rates = {"learning_rate": optimization.lr * factor}
        if optimization.optimizer == "muon" and optimization.muon_lr:
            rates["muon_learning_rate"] = optimization.muon_lr * factor
        return rates

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish(failed=error is not None)


def outcome(
    target_name: str,
    head: Head,
    config: TrainConfig,
    progress: Progress,
    acceptance: Mapping[str, Acceptance],
    best_step: int,
    rows: Sequence[Row],
    data: Mapping[str, Any],
) -> dict[str, Any]:
    """The report of a run; `acceptance` has the head `untrained`, at its `best` and at the `last` step."""
    logged = [row for row in rows if row["kind"] == "train"]
    best = acceptance["best"]
    return {
        "target": target_name,
        "kind": kind_of(head).name,
        "started_from": config.head.init_from or None,
        "acceptance_length": best.acceptance_length,
        "acceptance_by_position": best.acceptance_by_position,
        "untrained_acceptance_length": acceptance["untrained"].acceptance_length,
        "best_step": best_step,
        "acceptance": {name: dataclasses.asdict(found) for name, found in acceptance.items()},
        "loss": logged[-1]["loss"] if logged else None,
        "accuracy_by_step": logged[-1]["accuracy_by_step"] if logged else None,
        "steps": progress.step,
        "tokens": progress.tokens,
        "train_seconds": progress.train_seconds,
        "tokens_per_second": progress.tokens_per_second,
        "data": data,
        "head": dataclasses.asdict(head.config),
        "config": config.flat(),
        "machine": {
            "platform": platform.platform(),
            "device": str(mx.default_device()),
            "blas": str(blas.activate()),
            "dtype": str(pass_type(config)).rpartition(".")[2],
            "mlx": importlib.metadata.version("mlx"),
        },
    }


def memory_gb() -> dict[str, float]:
    """Return gigabytes (10⁹ bytes): MLX's arrays now and at most, and what the process took of the system at most."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    found = {"active": mx.get_active_memory(), "peak": mx.get_peak_memory(), "process_peak": most}
    return {name: round(size / 1e9, 4) for name, size in found.items()}
