"""The data of a run of so many hours, portion by portion: conversations in a file, their hidden states in shards."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from eagle_mlx.data_pipelines import (
    Limits,
    MakeConfig,
    ShardPlace,
    Wanted,
    make_to_file,
    making_engine,
    prompt_keys,
    shard_meta,
)
from eagle_mlx.formats import load_head
from eagle_mlx.heads.precision import quantize_for
from eagle_mlx.shards import MANIFEST, ShardReader
from eagle_mlx.target import Target

from ..config import TrainConfig
from ..data import Joined, OnDisk, TrainData, data_on_disk, heldout_prompts
from ..kinds import Head, aux_layers_of

FOLDER = "made"
_HELD_OUT = "held-out.jsonl"
_ANSWER = 16
"""Tokens of the answers to held-out prompts: the prompts alone are used, an answer that loops or refuses shows soon."""
_SEEDS = 1 << 16
"""Seeds that a run's own stands for: one for each portion, the last for the held-out prompts."""
_ALL = 1 << 40
"""More tokens than any time allows."""


class Portions:
    """Makes them in a run's folder, where an interrupted one is continued, and reads them."""

    def __init__(self, target: Target, config: TrainConfig, run: Path, head: Head | None = None):
        """`head`: one to continue from, which decides what is captured and what is drafted."""
        self._target, self._config, self._head = target, config, head
        self._aux_layers = aux_layers_of(target, config, head)
        self._folder = run / FOLDER
        self._read: list[OnDisk] = []

    def make_prompts(self, enough: Callable[[int], bool]) -> None:
        """The held-out prompts, unless they are there or others were named."""
        file = self._folder / _HELD_OUT
        if file.exists() or not self._config.prompts_are_heldout:
            return
        making = replace(self._making(_SEEDS - 1), turns=(1.0,), max_tokens=_ANSWER)
        wanted = Wanted(rows=self._config.evaluation.prompts)
        make_to_file(making_engine(self._target), making, wanted, file, limits=Limits(enough=enough))

    def prompts(self) -> list[list[int]]:
        """The tokens of the prompts that heads are judged on; none of them begins what is learnt from."""
        named = not self._config.prompts_are_heldout
        config = self._config if named else self._config.changed(eval_data=str(self._folder / _HELD_OUT))
        return heldout_prompts(self._target, config)

    def make(self, number: int, wanted: int, enough: Callable[[int], bool], head: Path | str | None) -> int:
        """Have a portion made, or what is left of it; returns its tokens to learn from.

        `wanted`: tokens; 0 for as many as there are until `enough`, which is asked with their number. A `head` drafts
        them, and the text is the same. Raises DataError where nothing usable comes, OutputError where the disk refuses.
        """
        meta = shard_meta(self._target, self._aux_layers, self._config.data.cache_bits)
        place = ShardPlace(self._shards(number), meta)
        if not (place.folder / MANIFEST).exists():
            drafts = load_head(head, self._target) if head is not None else None
            if drafts is not None:
                quantize_for(drafts, self._target)
            engine = making_engine(self._target, place, drafts)
            tokens, limits = Wanted(tokens=wanted or _ALL), Limits(self._known(number), enough)
            make_to_file(engine, self._making(number), tokens, self._file(number), place=place, limits=limits)
            mx.clear_cache()  # keys and values, for which training has no use
        return ShardReader(place.folder).tokens

    def data(self, count: int) -> TrainData:
        """What is learnt from when so many portions are made. The draft vocabulary is that of the first."""
        for number in range(len(self._read), count):
            reader = ShardReader(self._shards(number))
            most = min(self._config.data.max_length, self._target.context_length)
            self._read.append(OnDisk(reader, bool(self._aux_layers), most))
        first = data_on_disk(self._target, self._config, self._read[0], self._aux_layers, self._head)
        samples = Joined(self._read[:count])
        report = {
            **first.report,
            "conversations": len(samples.lengths),
            "tokens": sum(samples.lengths),
            "loss_tokens": sum(one.loss_tokens for one in self._read[:count]),
            "states": f"shards of {count} portion{'s' * (count > 1)}, captured while they were made",
        }
        return replace(first, samples=samples, report=report)

    def remove_states(self, count: int) -> None:
        """The hidden states go, the conversations stay."""
        for number in range(count):
            shutil.rmtree(self._shards(number), ignore_errors=True)

    def _making(self, number: int) -> MakeConfig:
        return MakeConfig(seed=self._config.run.seed * _SEEDS + number)

    def _known(self, number: int) -> set[int]:
        """What the held-out prompts and earlier portions begin with."""
        files = [self._folder / _HELD_OUT, *map(self._file, range(number))]
        return set().union(*(prompt_keys(file) for file in files if file.exists()))

    def _file(self, number: int) -> Path:
        return self._folder / f"{number:02d}.jsonl"

    def _shards(self, number: int) -> Path:
        return self._folder / f"{number:02d}.shards"
