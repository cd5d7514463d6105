"""The target makes up what a head learns from, before the training begins."""

from __future__ import annotations

import sys

import mlx.core as mx

from eagle_mlx.data_pipelines import DataConfig, MakeConfig, ShardPlace, Wanted, made_states, make_once, shard_meta
from eagle_mlx.files import write_output
from eagle_mlx.shards import ShardReader
from eagle_mlx.target import Target

from ..config import TrainConfig
from ..distributed import SINGLE_PROCESS, World
from ..kinds import aux_layers_of
from .storage import cache_folder, keeps_states, learnt_whole, self_file, sources_of


def make_data(
    target: Target, config: TrainConfig, world: World = SINGLE_PROCESS, head: object = None, reserve: int = 0
) -> None:
    """Have the file of conversations at its place on every machine: made by rank 0, or found as it was made before.

    Where one process trains, and there is room on the disk, the hidden states are kept of the forwards that write:
    those that the settings or a `head` read. `reserve` is the memory in bytes that the training will take.

    Raises OutputError where another file or other states stand there, DataError where the target writes nothing
    usable, TargetError where it cannot speak as its user, ConfigError for settings with which the file could not be
    read.
    """
    file = self_file(config)
    data_config(config)  # what cannot be read as it is asked for is said now, not in the morning
    if world.is_rank_zero:
        place = _place(target, config, head)
        alone = world.size == 1
        _make(target, config, place if alone and keeps_states(config, place.meta, reserve) else None)
    if world.size == 1:
        return
    # Made on each machine, two that round differently would learn from different texts.
    text: str = world.broadcast(file.read_text(encoding="utf-8") if world.is_rank_zero else None)
    if not world.is_rank_zero and not (file.exists() and file.read_text(encoding="utf-8") == text):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_output(file, text)


def states_of_made(target: Target, config: TrainConfig, head: object = None) -> ShardReader | None:
    """The hidden states of the forwards that wrote what is learnt from, where they were kept.

    Raises ShardError for a manifest that is damaged.
    """
    if not learnt_whole(config):
        return None
    return made_states(target, MakeConfig(seed=config.run.seed), _wanted(config), _place(target, config, head))


def _make(target: Target, config: TrainConfig, place: ShardPlace | None) -> None:
    file, making = self_file(config), MakeConfig(seed=config.run.seed)
    try:
        report = make_once(target, making, _wanted(config), file, progress=True, place=place)
    except KeyboardInterrupt:
        print(f"what {target.name} has made up is kept, and the same command continues with it", file=sys.stderr)
        raise
    mx.clear_cache()  # keys and values, for which training has no use
    print(f"{file}: {report.summary() if report is not None else 'made before, learnt from as it is'}", file=sys.stderr)


def _wanted(config: TrainConfig) -> Wanted:
    """With a conversation to measure acceptance on, whether or not this run does: the file is the same for all."""
    return Wanted(tokens=config.data.self_tokens, heldout=1)


def _place(target: Target, config: TrainConfig, head: object) -> ShardPlace:
    meta = shard_meta(target, aux_layers_of(target, config, head), config.data.cache_bits)
    return ShardPlace(cache_folder(config), meta)


def data_config(config: TrainConfig) -> DataConfig:
    """What to read, and what of it to keep."""
    return DataConfig(
        sources_of(config),
        config.data.map,
        config.data.limit,
        config.run.seed,
        config.data.stream,
        config.data.skip_bad,
        config.data.keep_turns,
        config.data.keep_tokens,
        config.data.dedupe,
    )
