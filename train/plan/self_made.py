"""Conversations that the target makes up for a run: where they stand, and whether it can make them."""

from __future__ import annotations

from pathlib import Path

from eagle_mlx.data_pipelines import MakeConfig, beginning, steerable
from eagle_mlx.target import Target

from ..config import TrainConfig


def self_file(config: TrainConfig) -> Path:
    """The file that they are made into, beside the output; there interrupted making continues."""
    return Path(f"{config.run.output.rstrip('/')}.self.jsonl")


def sources_of(config: TrainConfig) -> tuple[str, ...]:
    """What the data are read from, with that file for `self`."""
    return (str(self_file(config)),) if config.data.is_self else config.data.sources


def check_speaks(target: Target) -> None:
    """Raise TargetError for a target that can make up nothing. One without a tokenizer is not looked at."""
    if target.tokenizer is None:
        return
    if target.tokenizer.has_chat_template:
        steerable(target.tokenizer, MakeConfig().domains, target.name)
    else:
        beginning(target.tokenizer, target.name)
