"""What a run came to: the contents of report.json."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from eagle_mlx.cpu import blas

from ..config import TrainConfig, pass_type
from ..evaluation import Acceptance
from ..kinds import Head, kind_of
from ..report import Row
from .progress import Progress


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
