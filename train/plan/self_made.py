"""Conversations that the target makes up for a run: where they stand, and whether it can make them."""

from __future__ import annotations

from pathlib import Path

from eagle_mlx.data_pipelines import MakeConfig, beginning, steerable
from eagle_mlx.memory import free_memory
from eagle_mlx.shards import ShardMeta, states_bytes
from eagle_mlx.target import Target

from ..config import TrainConfig
from .cache import choose_states, room


def self_file(config: TrainConfig) -> Path:
    """The file that they are made into, beside the output; there interrupted making continues."""
    return Path(f"{config.run.output.rstrip('/')}.self.jsonl")


def sources_of(config: TrainConfig) -> tuple[str, ...]:
    """What the data are read from, with that file for `self`."""
    return (str(self_file(config)),) if config.data.is_self else config.data.sources


def learnt_whole(config: TrainConfig) -> bool:
    """Whether what the target makes up is learnt from as it is: nothing of it is left out when it is read."""
    data = config.data
    return data.is_self and not (data.limit or data.keep_turns or data.keep_tokens or data.dedupe != "none")


def keeps_states(config: TrainConfig, meta: ShardMeta, reserve: int = 0) -> bool:
    """Whether the forwards that write are captured, on the disk, so that nothing is read again.

    Making takes long and is interrupted, so what is captured meanwhile stands on the disk and never in memory alone.
    `reserve` as in `choose_states`, which raises where `--states disk` has too little room.
    """
    if not learnt_whole(config):
        return False
    choice = choose_states(config, config.data.self_tokens, meta, reserve)
    if config.data.states != "auto":
        return choice.place == "disk"
    size = states_bytes(config.data.self_tokens, meta)
    return choice.place != "online" and size <= room(config, reserve, free_memory())[1]


def check_speaks(target: Target) -> None:
    """Raise TargetError for a target that can make up nothing. One without a tokenizer is not looked at."""
    if target.tokenizer is None:
        return
    if target.tokenizer.has_chat_template:
        steerable(target.tokenizer, MakeConfig().domains, target.name)
    else:
        beginning(target.tokenizer, target.name)
