"""The folder of a run: made and locked for one process, and what says which run it is.

A run continues only as it began: with its settings, its target and its data.
"""

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

from eagle_mlx.errors import CheckpointError, ConfigError, OutputError
from eagle_mlx.files import check_free, locked, swap, write_whole

from ..config import TrainConfig, flag
from ..data import Examples, sources_of
from . import state

RUN_FILE = "run.json"
_COMPARED_SAMPLES = 256
"""Samples whose tokens are compared, evenly spread over the data; the lengths of all are."""
MUTABLE = (
    "output",
    "overwrite",
    "cache_dir",
    "checkpoints",
    "checkpoint_minutes",
    "log_steps",
    "wandb",
    "wandb_project",
)
"""Settings that change nothing of what is learnt, so that a run may continue with others."""


@dataclass(frozen=True)
class Identity:
    config: TrainConfig
    target: str
    """Fingerprint of the target's weights and template."""
    data: str
    """Fingerprint of the samples' tokens."""
    processes: int = 1
    """Each reads a part of every batch."""


def fingerprint_of(samples: Examples) -> str:
    """Hexadecimal digits made from the lengths of all samples and the tokens and masks of some."""
    lengths = np.array(samples.lengths, np.int64)
    digest = hashlib.blake2s(lengths.tobytes())
    for index in np.unique(np.linspace(0, len(lengths) - 1, min(_COMPARED_SAMPLES, len(lengths))).astype(int)):
        sample = samples[int(index)]
        digest.update(sample.tokens.tobytes())
        digest.update(sample.loss_mask.tobytes())
    return digest.hexdigest()[:16]


def write_identity(folder: Path, identity: Identity) -> None:
    """Put it into the folder of a run."""
    values = {**dataclasses.asdict(identity), "config": identity.config.flat()}
    write_whole(folder / RUN_FILE, (json.dumps(values, indent=2) + "\n").encode())


def read_identity(folder: Path) -> Identity:
    """What the run in a folder is. Raises CheckpointError where there is none."""
    file = folder / RUN_FILE
    try:
        values = json.loads(file.read_text())
        return Identity(TrainConfig.of(**values["config"]), values["target"], values["data"], values["processes"])
    except FileNotFoundError as e:
        raise CheckpointError(
            f"{folder} holds no run ({RUN_FILE} is missing); name the --output of a run that was cut short"
        ) from e
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as e:
        raise CheckpointError(f"{file} cannot be read: {e}") from e


def resumed_config(folder: Path, changes: Mapping[str, Any]) -> TrainConfig:
    """The settings of the run in a folder, with those changed that may be.

    Raises ConfigError for one that would make it another run, CheckpointError where no run is there.
    """
    began = read_identity(folder).config
    config = TrainConfig.of(**{**began.flat(), **changes})
    for name in changes:
        before, now = began.value(name), config.value(name)
        if before != now and name not in MUTABLE:
            raise ConfigError(
                f"{flag(name)} is {now!r}, but the run in {folder} began with {before!r}; leave {flag(name)} out, "
                f"or begin another run from its head with --init-from {folder}/last"
            )
    return config


def check_same(folder: Path, now: Identity) -> None:
    """Raise ConfigError where target, data or processes are not those that the run in a folder began with."""
    began = read_identity(folder)
    if began.processes != now.processes:
        raise ConfigError(
            f"the run in {folder} began with {began.processes} process{'es' * (began.processes > 1)}, not "
            f"{now.processes}; start as many (`mlx.launch -n {began.processes}`), since they share each batch"
        )
    if began.target != now.target:
        raise ConfigError(
            f"{now.config.head.target} is not the target that the run in {folder} began with; bring it back"
        )
    if began.data != now.data:
        source = ", ".join(now.config.data.shards or sources_of(now.config))
        raise ConfigError(f"the data of {source} are not those that the run in {folder} began with; bring them back")


MADE = "made"
"""The folder of what the target makes up, within that of a run of so many hours."""


@contextlib.contextmanager
def run_folder(
    output: str | Path, overwrite: bool, resume: Path | None = None, claimed: Path | None = None
) -> Iterator[Path]:
    """The folder that a run writes to: the one that is `claimed` already, or what `claim` gives.

    Raises OutputError if it cannot be written, with what is kept in it and how the run continues.
    """
    folder = claimed
    try:
        with contextlib.nullcontext(claimed) if claimed else claim(output, overwrite, resume) as folder:
            yield folder
    except OSError as e:
        kept = folder is not None and worth_keeping(folder)
        how = f"; what is done is kept: make room, then continue with eagle-train --resume {folder}" if kept else ""
        raise OutputError(f"{output} could not be written: {e.strerror or e}{how}") from e


@contextlib.contextmanager
def claim(output: str | Path, overwrite: bool, resume: Path | None = None) -> Iterator[Path]:
    """Make and lock the folder of a run, so that no second run can write there.

    It is `output` itself where that is free, and `resume` where a run continues. Where `output` is to be overwritten it
    is a folder beside it, which takes its place when the block ends well, now or after it was resumed. A new run that
    fails leaves no folder, unless that is worth keeping. Raises OutputError, before anything is done, if the folder is
    taken, cannot be made, or another process writes there.
    """
    path = Path(output) if resume else check_free(output, overwrite)
    with contextlib.ExitStack() as locks:
        exists = path.exists()
        replaces = _replaces(resume, path) if resume else exists and any(path.iterdir())
        if exists and (replaces or not resume):
            locks.enter_context(locked(path))
        folder = resume or _new(path, beside=replaces)
        if resume or replaces or not exists:
            locks.enter_context(locked(folder))
        if not (resume or overwrite):
            check_free(output)  # another run may have ended meanwhile
        try:
            yield folder
            if replaces:
                swap(folder, path)
        except BaseException:
            if not resume and not worth_keeping(folder):
                shutil.rmtree(folder, ignore_errors=True)
            elif replaces and folder.exists():
                tqdm.write(f"what the unfinished run has made is in {folder}; {path} is as it was")
            raise


def worth_keeping(run: Path) -> bool:
    """Return whether a run's folder holds a state to resume from, or data that were made or are in the making."""
    return state.exists(run) or any((run / MADE).glob("*"))


def _new(path: Path, beside: bool) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=_beside(path), dir=path.parent)) if beside else path
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    except OSError as e:
        raise OutputError(f"{path} cannot be made: {e.strerror or e}") from e
    return folder


def _replaces(resume: Path, output: Path) -> bool:
    """Whether a folder was made to take the place of `output`."""
    return resume.resolve().parent == output.resolve().parent and resume.name.startswith(_beside(output))


def _beside(path: Path) -> str:
    return f".{path.name}.new."
