"""A run's folder, locked for one process, and the run's identity: it only continues with the same target and data."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from eagle_mlx.errors import CheckpointError, ConfigError, OutputError, in_one_line
from eagle_mlx.files import check_free, is_empty, locked, swap, write_whole

from ..config import TrainConfig, flag
from ..data import TrainData, sources_of
from . import state

RUN_FILE, REPORT = "run.json", "report.json"
BEST, LAST = "best", "last"  # subfolders for heads. They appear when they are complete
MADE = "made"  # subfolder for the conversations that the target makes in a run with a time limit
MUTABLE = ("cache_dir", "checkpoints", "checkpoint_minutes", "log_steps", "wandb", "wandb_project")
"""Settings that a resumed run may change, because they affect neither training nor the place of its output."""


@dataclass(frozen=True)
class Identity:
    config: TrainConfig
    target: str  # fingerprint of the target's weights and template
    data: str  # fingerprint of the samples' tokens
    processes: int = 1  # each process takes a part of every batch
    adapted: str = ""  # hash of the head that the run adapts; empty if a run only begins with it, and saves all weights


def data_fingerprint(data: TrainData) -> str:
    """Return a hex digest of the lengths of all samples and of the tokens and masks of 256, evenly spread."""
    lengths = np.array(data.samples.lengths, np.int64)
    digest = hashlib.blake2s(lengths.tobytes())
    for index in np.unique(np.linspace(0, len(lengths) - 1, min(256, len(lengths))).astype(int)):
        sample = data.samples[int(index)]
        digest.update(sample.tokens.tobytes())
        digest.update(sample.loss_mask.tobytes())
    return digest.hexdigest()[:16]


def write_identity(folder: Path, identity: Identity) -> None:
    values = {**dataclasses.asdict(identity), "config": identity.config.flat()}
    write_whole(folder / RUN_FILE, (json.dumps(values, indent=2) + "\n").encode())


def read_identity(folder: Path) -> Identity:
    """Return the identity of the run in a folder. Raises CheckpointError if there is none."""
    file = folder / RUN_FILE
    try:
        values = json.loads(file.read_text())
        config = TrainConfig.of(**values["config"])
        return Identity(config, values["target"], values["data"], values["processes"], values.get("adapted", ""))
    except FileNotFoundError as e:
        raise CheckpointError(
            f"{folder} has no run ({RUN_FILE} is missing); name the --output of an interrupted run"
        ) from e
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as e:
        raise CheckpointError(f"{file} cannot be read: {in_one_line(e)}; train on from a head with --init-from") from e


def resumed_config(folder: Path, changes: Mapping[str, Any]) -> TrainConfig:
    """Return the settings of the run in a folder, with changes. Raises ConfigError if a setting must not change."""
    began = read_identity(folder).config.flat()
    config = TrainConfig.of(**{**began, **changes})
    for name in changes:
        before, now = began[name], config.flat()[name]
        if before != now and name not in MUTABLE:
            raise ConfigError(
                f"{flag(name)} is {now!r}, but the run in {folder} began with {before!r}; leave {flag(name)} out, "
                f"or start another run from its head with --init-from {folder}/last"
            )
    return config


def check_same(folder: Path, now: Identity) -> None:
    """Raise ConfigError if target, data or processes differ from those that the run in a folder began with."""
    began, config, head = read_identity(folder), now.config, now.config.head
    source = ", ".join(config.data.shards or sources_of(config))
    messages = {
        "processes": f"the run in {folder} began with {began.processes} process{'es' * (began.processes > 1)}, not "
        f"{now.processes}; start the same number (`mlx.launch -n {began.processes}`), since they share each batch",
        "target": f"{head.target} is not the target that the run in {folder} began with; restore that target",
        "adapted": f"{head.init_from} is not the head that the run in {folder} began to adapt; restore that head",
        "data": f"the data in {source} has changed since the run in {folder} began; restore it",
    }
    for name, message in messages.items():
        if getattr(began, name) != getattr(now, name):
            raise ConfigError(message)


@contextlib.contextmanager
def explained(output: str, folder: Path) -> Iterator[None]:
    """Let an OutputError from within tell what is kept in the run's folder, and how to resume."""
    try:
        yield
    except (OSError, OutputError) as e:
        text = f"{output} could not be written: {e.strerror or e}" if isinstance(e, OSError) else str(e)
        if _can_resume(folder):
            text += f"; the results so far are kept: free some space, then continue with eagle-train --resume {folder}"
        elif worth_keeping(folder):
            text += (
                f"; the results so far are kept in {folder}, but no state to resume from: free some space, then train "
                f"further with --init-from {folder / LAST}"
            )
        raise OutputError(text) from e


@contextlib.contextmanager
def claim(output: str | Path, overwrite: bool, resume: Path | None = None) -> Iterator[Path]:
    """Create and lock a run's folder, so that no other run can write there.

    The folder is `resume` if a run continues, else `output`. To overwrite an `output` that is not empty, a temporary
    folder next to it replaces it when the block succeeds, possibly after a resume. A new run that fails leaves no
    folder, unless it is worth keeping. Raises OutputError immediately if the folder is taken, cannot be created, or is
    in use by another process.
    """
    path = Path(output) if resume else check_free(output, overwrite)
    with contextlib.ExitStack() as locks:
        exists = path.exists()
        replaces = _replaces(resume, path) if resume else exists and not is_empty(path)
        if exists and (replaces or not resume):
            locks.enter_context(locked(path))
        folder = resume or _new(path, replaces)
        if resume or replaces or not exists:
            locks.enter_context(locked(folder))
        if not (resume or overwrite):
            check_free(output)  # another run may have just ended
        try:
            yield folder
            if replaces:
                swap(folder, path)
        except BaseException:
            if not resume and not worth_keeping(folder):
                shutil.rmtree(folder, ignore_errors=True)
            elif replaces and folder.exists():
                tqdm.write(f"the unfinished run is in {folder}; {path} is unchanged")
            raise


def worth_keeping(run: Path) -> bool:
    """Return whether a run's folder holds a trained head, a state to resume from, or complete or partial data."""
    return _can_resume(run) or (run / LAST).is_dir()  # `best` may be the start


def _can_resume(run: Path) -> bool:
    return state.exists(run) or any((run / MADE).glob("*"))


def _new(path: Path, temporary: bool) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=_prefix(path), dir=path.parent)) if temporary else path
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    except OSError as e:
        raise OutputError(f"{path} cannot be created: {e.strerror or e}") from e
    return folder


def _replaces(resume: Path, output: Path) -> bool:
    return resume.resolve().parent == output.resolve().parent and resume.name.startswith(_prefix(output))


def _prefix(path: Path) -> str:
    return f".{path.name}.new."


def check_incomplete(resume: Path | None) -> None:
    """Raise CheckpointError if the run is complete."""
    if resume and (resume / REPORT).exists():
        raise CheckpointError(
            f"the run in {resume} is complete; to train its head further, start another run with --init-from "
            f"{resume}/{BEST}"
        )
