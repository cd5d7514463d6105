"""What a run is: its settings, its target and its data, so that it is continued as it began."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle_mlx.errors import CheckpointError, ConfigError
from eagle_mlx.files import write_whole

from ..config import TrainConfig, flag
from ..data import Examples, sources_of

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


def write(folder: Path, identity: Identity) -> None:
    """Put it into the folder of a run."""
    values = {**dataclasses.asdict(identity), "config": identity.config.flat()}
    write_whole(folder / RUN_FILE, (json.dumps(values, indent=2) + "\n").encode())


def read(folder: Path) -> Identity:
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
    began = read(folder).config
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
    began = read(folder)
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
