"""A run's progress, and its saved states: written atomically, verified when loaded; only the newest few are kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from eagle_mlx.errors import CheckpointError
from eagle_mlx.files import new_folder
from eagle_mlx.formats.tensors import write_tensors
from eagle_mlx.progress import progress_bar, tokens_per_second

from ..evaluation import Acceptance
from ..step import StepResult


@dataclass
class Progress:
    step: int = 0
    tokens: int = 0
    epoch: int = 0
    batch: int = 0  # batches learned in this epoch
    train_seconds: float = 0.0  # seconds spent in steps, without evaluations

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.train_seconds, 1e-9)


class Stopwatch:
    """Measures the seconds of a run, including those before interruptions."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._begin = clock()

    @property
    def elapsed(self) -> float:
        return self._clock() - self._begin

    def restart(self, elapsed: float = 0.0) -> None:
        self._begin = self._clock() - elapsed


class Bar:
    """A progress bar in seconds if there is a time limit, else in steps; `done` of them before a resume."""

    def __init__(self, seconds: float = math.inf, steps: float = math.inf, done: float = 0):
        self._seconds = seconds
        form = "{l_bar}{bar}| {n:.0f}/{total:.0f} {unit} [{elapsed}<{remaining}{postfix}]"
        total, unit = (seconds, "s") if seconds < math.inf else (steps, "steps")
        self.bar = progress_bar(total=total, initial=min(done, total), desc="train", unit=unit, bar_format=form)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def show(self, elapsed: float, progress: Progress | None = None, results: Sequence[StepResult] = ()) -> None:
        """Show progress after `elapsed` seconds, and the mean loss and accuracy of the latest results."""
        steps = progress.step if progress else 0
        self.bar.update((min(elapsed, self._seconds) if self._seconds < math.inf else steps) - self.bar.n)
        if progress and results:
            accuracy = " ".join(f"{share:.2f}" for share in mean([r.accuracy_by_step for r in results]))
            speed = tokens_per_second(progress.tokens_per_second)
            text = f"loss {mean([r.loss for r in results]):.3f}, accuracy {accuracy}, {speed}"
            self.bar.set_postfix_str(text, refresh=False)


def mean(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, or of lists of numbers by position."""
    return np.mean(values, axis=0).tolist()


STATES = "checkpoints"  # subfolder for states in a run's folder
_ABOUT, _HEAD, _STEPPER = "state.json", "head.safetensors", "optimizer.safetensors"

Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class RunState:
    """Everything that the next step needs besides weights and optimizer, and the run's results so far."""

    progress: Progress
    elapsed: float  # seconds of the run, including evaluations
    next_eval: float  # step, second or share of the run at which the next evaluation is due
    untrained: Acceptance
    best_step: int
    best: Acceptance
    recent: list[StepResult]  # results of steps that are not in metrics.jsonl yet


@dataclass(frozen=True)
class RunCheckpoint:
    state: RunState
    head: Arrays  # the head's trainable weights by name, without conversion
    stepper: Arrays  # the optimizers' moments and step counts


def save(run: Path, checkpoint: RunCheckpoint, keep: int) -> Path:
    """Write a checkpoint atomically, then remove all but the newest `keep`. Raises OutputError before any removal."""
    folder = run / STATES / f"step-{checkpoint.state.progress.step:08d}"
    with new_folder(folder, overwrite=True) as part:
        write_tensors(part / _HEAD, checkpoint.head)
        write_tensors(part / _STEPPER, checkpoint.stepper)
        sums = {name: _digest(part / name) for name in (_HEAD, _STEPPER)}
        about = {"sha256": sums, "state": dataclasses.asdict(checkpoint.state)}
        (part / _ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    for old in _folders(run)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def newest(run: Path, warn: Callable[[str], None]) -> RunCheckpoint | None:
    """Return the newest intact checkpoint, or None without any. Warn of damaged ones; remove leftovers of interrupted
    writes. Raises CheckpointError if all are damaged: to begin again would replace the run's heads.
    """
    for part in (run / STATES).glob(".*"):
        shutil.rmtree(part, ignore_errors=True)
    for folder in _folders(run):
        try:
            return load(folder)
        except CheckpointError as e:
            warn(str(e))
    if exists(run):
        raise CheckpointError(
            f"{run / STATES} has no intact state; train further from a head in {run} with --init-from, or remove "
            f"{run / STATES} to begin again"
        )
    return None


def load(folder: Path) -> RunCheckpoint:
    """Load a checkpoint. Raises CheckpointError with the file's name if it is damaged."""
    from pydantic import TypeAdapter  # not at the top, so that `eagle-train --help` works without it

    try:
        about = json.loads((folder / _ABOUT).read_text())
        for name, digest in about["sha256"].items():
            if _digest(folder / name) != digest:
                raise CheckpointError(f"{folder / name} is damaged: its SHA-256 does not match")
        state = TypeAdapter(RunState).validate_python(about["state"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{folder} cannot be read: {type(e).__name__} {e}") from e
    head, stepper = (cast(Arrays, mx.load(str(folder / name))) for name in (_HEAD, _STEPPER))
    mx.eval(head, stepper)
    return RunCheckpoint(state, head, stepper)


def remove(run: Path) -> None:
    shutil.rmtree(run / STATES, ignore_errors=True)


def exists(run: Path) -> bool:
    return bool(_folders(run))


def _folders(run: Path) -> list[Path]:
    return sorted((run / STATES).glob("step-*"), reverse=True)  # newest first


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
