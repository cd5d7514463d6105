"""Saved states of a run: written atomically, verified when loaded; only the newest few are kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from pydantic import TypeAdapter

from eagle_mlx.errors import CheckpointError
from eagle_mlx.files import new_folder
from eagle_mlx.formats.tensors import write_tensors

from ..evaluation import Acceptance
from ..kinds import Head
from ..step import StepResult
from .progress import Progress

STATES = "checkpoints"
"""Subfolder for states in a run's folder."""
_ABOUT, _HEAD, _STEPPER = "state.json", "head.safetensors", "optimizer.safetensors"
_VERSION = 1

Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class RunState:
    """Everything that the next step needs besides weights and optimizer, and the run's results so far."""

    progress: Progress
    elapsed: float
    """Seconds of the run, including evaluations."""
    next_eval: float
    """Step, second or share of the run at which the next evaluation is due."""
    untrained: Acceptance
    best_step: int | None
    best: Acceptance | None
    recent: list[StepResult]
    """Results of steps that are not in metrics.jsonl yet."""


@dataclass(frozen=True)
class Checkpoint:
    """A run's state with its arrays."""

    state: RunState
    head: Arrays
    """The head's trainable weights by name, without conversion."""
    stepper: Arrays
    """The optimizers' moments and step counts."""


def save(run: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint into a run's folder, then remove all but the newest `keep`.

    The write is atomic and flushed to disk. Raises OutputError if the disk is full or cannot be written; earlier
    checkpoints are not touched.
    """
    folder = run / STATES / f"step-{checkpoint.state.progress.step:08d}"
    with new_folder(folder, overwrite=True) as part:
        write_tensors(part / _HEAD, checkpoint.head)
        write_tensors(part / _STEPPER, checkpoint.stepper)
        sums = {name: _digest(part / name) for name in (_HEAD, _STEPPER)}
        about = {"version": _VERSION, "sha256": sums, "state": dataclasses.asdict(checkpoint.state)}
        (part / _ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    for old in _folders(run)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def newest(run: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest intact checkpoint, or None. Skip damaged ones with a warning.

    Removes leftovers of interrupted writes.
    """
    for part in (run / STATES).glob(".*"):
        shutil.rmtree(part, ignore_errors=True)
    for folder in _folders(run):
        try:
            return load(folder)
        except CheckpointError as e:
            warn(f"{e}; going back to the previous one")
    return None


def load(folder: Path) -> Checkpoint:
    """Load a checkpoint. Raises CheckpointError with the file's name if it is damaged."""
    try:
        about = json.loads((folder / _ABOUT).read_text())
        if about["version"] != _VERSION:
            raise CheckpointError(f"{folder} was written by another version of eagle-train")
        for name, digest in about["sha256"].items():
            if _digest(folder / name) != digest:
                raise CheckpointError(f"{folder / name} is damaged: its SHA-256 does not match")
        state = TypeAdapter(RunState).validate_python(about["state"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{folder} cannot be read: {type(e).__name__} {e}") from e
    head, stepper = (cast(Arrays, mx.load(str(folder / name))) for name in (_HEAD, _STEPPER))
    mx.eval(head, stepper)
    return Checkpoint(state, head, stepper)


def weights_of(head: Head) -> Arrays:
    """Return a head's trainable weights by name."""
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(head.trainable_parameters())))


def load_weights(head: Head, weights: Arrays) -> None:
    """Restore a head's weights."""
    head.update(tree_unflatten(list(weights.items())))


def remove(run: Path) -> None:
    """Remove all states of a run."""
    shutil.rmtree(run / STATES, ignore_errors=True)


def exists(run: Path) -> bool:
    return bool(_folders(run))


def _folders(run: Path) -> list[Path]:
    """Return the folders of states, newest first."""
    return sorted((run / STATES).glob("step-*"), reverse=True)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
