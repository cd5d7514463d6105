"""The target makes up what a head learns from, before the training begins."""

from __future__ import annotations

import sys

import mlx.core as mx

from eagle_mlx.data_pipelines import MakeConfig, Wanted, make_once
from eagle_mlx.files import write_output
from eagle_mlx.target import Target

from ..config import TrainConfig
from ..distributed import SINGLE_PROCESS, World
from ..plan import self_file
from .sources import data_config


def make_data(target: Target, config: TrainConfig, world: World = SINGLE_PROCESS) -> None:
    """Have the file of conversations at its place on every machine: made by rank 0, or found as it was made before.

    Raises OutputError where another one stands there, DataError where the target writes nothing usable, TargetError
    where it cannot speak as its user, ConfigError for settings with which the file could not be read.
    """
    file = self_file(config)
    data_config(config)  # what cannot be read as it is asked for is said now, not in the morning
    if world.is_rank_zero:
        _make(target, config)
    if world.size == 1:
        return
    # Made on each machine, two that round differently would learn from different texts.
    text: str = world.broadcast(file.read_text(encoding="utf-8") if world.is_rank_zero else None)
    if not world.is_rank_zero and not (file.exists() and file.read_text(encoding="utf-8") == text):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_output(file, text)


def _make(target: Target, config: TrainConfig) -> None:
    file, seed = self_file(config), config.run.seed
    try:
        report = make_once(target, MakeConfig(seed=seed), Wanted(tokens=config.data.self_tokens), file, progress=True)
    except KeyboardInterrupt:
        print(f"what {target.name} has made up is kept, and the same command continues with it", file=sys.stderr)
        raise
    mx.clear_cache()  # keys and values, for which training has no use
    print(f"{file}: {report.summary() if report is not None else 'made before, learnt from as it is'}", file=sys.stderr)
