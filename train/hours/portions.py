"""A run with a time limit: its journal, from which it resumes, and its portions of data.

Each portion has a file of conversations and shards of their hidden states.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import mlx.core as mx
from pydantic import TypeAdapter

from eagle_mlx.data_pipelines import (
    DataConfig,
    Enough,
    MakeConfig,
    MakeLimits,
    Sample,
    ShardCapture,
    Wanted,
    growing_engine,
    held_out_prompts,
    make_to_file,
    prompt_keys,
    read_conversations,
    render_all,
    shard_meta,
)
from eagle_mlx.errors import CheckpointError, DataError, in_one_line
from eagle_mlx.files import free_disk, write_whole
from eagle_mlx.head_check import load_head
from eagle_mlx.hidden_states import Example
from eagle_mlx.progress import counted
from eagle_mlx.shards import MANIFEST, ShardReader, bytes_per_token
from eagle_mlx.target import Target

from ..config import MOST_PROMPTS, TrainSettings
from ..data import EvalPrompts, InMemory, OnDisk, TrainData, amount, data_on_disk, heldout_prompts, questions_of
from ..kinds import Head, aux_layers_of
from ..run import MADE
from ..step import WarmupStableDecay

FILE = "hours.json"


@dataclass
class Portion:
    """A portion of data, and the learning phase after it."""

    begun: float  # second of the run at which it began
    wanted: int = 0  # tokens to make; 0 for as many as the time allows
    last: bool = False
    tokens: int | None = None  # tokens made; None until the portion is complete, and 0 if the phase only learns
    made_seconds: float = 0.0
    schedule: WarmupStableDecay | None = None  # schedule of the learning phase; None before it begins
    epoch: int = 0  # first epoch of the learning phase
    fresh: int = 0  # the first portion with data that this phase learns first; earlier portions were learned before
    learned: int = 0  # tokens learned in that phase, including repetitions
    learned_seconds: float = 0.0  # seconds of the phase without its measurement
    until: tuple[int, int] = (0, 0)  # epoch and batch at which learning stopped
    acceptance_length: float | None = None  # τ after the phase; None until it is measured


@dataclass
class Journal:
    elapsed: float = 0.0
    portions: list[Portion] = field(default_factory=list)

    def tokens(self, first: int, end: int | None = None) -> int:
        """Return the tokens of complete portions from `first` on, up to `end`."""
        return sum(portion.tokens or 0 for portion in self.portions[first:end])

    @property
    def made(self) -> int:
        return self.tokens(0)

    def write(self, folder: Path, elapsed: float) -> None:
        """Write the journal into a run's folder after this many seconds. Raises OSError."""
        self.elapsed = elapsed
        write_whole(folder / FILE, TypeAdapter(Journal).dump_json(self, indent=1) + b"\n")

    @staticmethod
    def read(folder: Path) -> Journal:
        """Return the journal in a run's folder, or an empty one. Raises CheckpointError if it is damaged."""
        file = folder / FILE
        if not file.exists():
            return Journal()
        try:
            return TypeAdapter(Journal).validate_json(file.read_bytes())
        except (OSError, ValueError) as e:
            raise CheckpointError(f"{file} cannot be read: {in_one_line(e)}; start another run") from e


_HELD_OUT = "held-out.jsonl"
_SEEDS = 1 << 16  # seeds derived from the run's seed: one per portion, and the last for the held-out prompts
_ALL = 1 << 40  # more tokens than any time allows


class Portions:
    """Makes and reads the portions in a run's folder, and continues interrupted ones."""

    def __init__(self, target: Target, config: TrainSettings, run: Path, head: Head | None = None):
        """`head`: the head to continue from, which determines captured layers and draft vocabulary."""
        self._target, self._config = target, config
        self._head, self._folder = head, run / MADE
        self._aux_layers = aux_layers_of(target, config, head)
        self._texts: dict[int, list[Example]] = {}  # conversations of complete portions, without hidden states
        self._readers: dict[int, ShardReader] = {}  # of complete portions with hidden states
        self._first: TrainData | None = None

    def make_prompts(self, enough: Enough) -> None:
        """Make the held-out prompts, unless they exist or the config names others."""
        file = self._folder / _HELD_OUT
        if file.exists() or not self._config.prompts_are_heldout:
            return
        # Only the prompts are used; short answers reveal loops and refusals.
        making = replace(self._making(_SEEDS - 1, self._own(held_out=True)), turns=(1.0,), max_tokens=16)
        wanted = Wanted(rows=self._config.evaluation.prompts or MOST_PROMPTS)
        make_to_file(growing_engine(self._target), making, wanted, file, limits=MakeLimits(enough=enough))

    @cached_property
    def prompts(self) -> EvalPrompts:
        """The held-out prompts. No training conversation begins with one of those that the target made."""
        named = not self._config.prompts_are_heldout
        config = self._config if named else self._config.changed(eval_data=str(self._folder / _HELD_OUT))
        return heldout_prompts(self._target, config)

    def make(self, number: int, wanted: int, limits: MakeLimits, head: Path | str | None) -> int:
        """Make a portion, or the rest of it, and capture its hidden states if they fit. Return its number of tokens.

        `wanted`: tokens; 0 for as many as the `limits` allow. `head`: drafts the text. Raises DataError if there is
        nothing to learn from, OutputError if it cannot be written.
        """
        if not self._file(number).exists():
            drafts = load_head(head, self._target, check=False) if head is not None else None
            files = [self._folder / _HELD_OUT, *map(self._file, range(number))]
            earlier = set[int]().union(*(prompt_keys(file) for file in files if file.exists()))
            tokens, limits = Wanted(tokens=wanted or _ALL), replace(limits, elsewhere=earlier)
            making = self._making(number, self._own(held_out=False, without=earlier))
            make_to_file(growing_engine(self._target, drafts), making, tokens, self._file(number), limits=limits)
            mx.clear_cache()  # free the KV caches before training
        samples = self._rendered(number)
        made = sum(len(sample.tokens) for sample in samples)
        if not made:
            name = self._target.name
            raise DataError(f"the time was over before {name} had written a conversation to learn from; raise --hours")
        if not number or self._fits(number, made):
            bits = self._config.data.cache_bits
            ShardCapture(self._target, self._aux_layers, samples, bits).write(self._shards(number), resume=True)
        return made

    def conversations(self, count: int) -> int:
        """Return the number of samples in the first `count` portions."""
        return sum(len(self._reader(number) or self._examples(number)) for number in range(count))

    def data(self, count: int) -> TrainData:
        """Return the training data of the first `count` portions. The first portion sets the draft vocabulary."""
        readers = [reader for number in range(count) if (reader := self._reader(number)) is not None]
        if self._first is None:  # the first portion always has hidden states
            first = OnDisk(readers[0])
            self._first = data_on_disk(self._target, self._config, first, self._aux_layers, self._head)
        samples: InMemory | OnDisk
        if len(readers) == count:
            samples, states = OnDisk(*readers), f"shards of {counted(count, 'portion')}, captured once"
        else:
            samples = InMemory([example for number in range(count) for example in self._examples(number)])
            states = "captured for each batch, since those of all portions do not fit"
        report = {**self._first.report, **amount(samples), "states": states}
        return replace(self._first, samples=samples, report=report)

    def remove_states(self, count: int) -> None:
        """Delete the hidden states of the first `count` portions, but not the conversations."""
        for number in range(count):
            shutil.rmtree(self._shards(number), ignore_errors=True)

    def _reader(self, number: int) -> ShardReader | None:
        """Return the hidden states of a complete portion, if they were saved."""
        if number not in self._readers and (self._shards(number) / MANIFEST).exists():
            self._readers[number] = ShardReader(self._shards(number))
        return self._readers.get(number)

    def _examples(self, number: int) -> list[Example]:
        """Return the conversations of a complete portion without hidden states, in the order of its shards, if any."""
        if number not in self._texts:
            examples = self._reader(number) or (Example.of(*sample[:3]) for sample in self._rendered(number))
            self._texts[number] = [replace(example, states=None) for example in examples]
        return self._texts[number]

    def _rendered(self, number: int) -> list[Sample]:
        """Return the conversations of a portion to learn from, which are not held out."""
        tokenizer = self._target.tokenizer
        assert tokenizer is not None, "a target without a tokenizer makes no data"
        rows = read_conversations(DataConfig((str(self._file(number)),), seed=None), "all", tokenizer)
        most = min(self._config.data.max_length, self._target.context_length)
        return render_all(tokenizer, (row for row in rows if not row.is_held_out), most)[0]

    def _fits(self, number: int, tokens: int) -> bool:
        """Return whether a portion's states fit --cache-gb and the disk, and those of all earlier ones are saved."""
        readers = [self._reader(earlier) for earlier in range(number)]
        held = sum(reader.tokens for reader in readers if reader is not None)
        room = 0.9 * free_disk(self._folder)  # so that a long run does not fill the disk
        size = bytes_per_token(shard_meta(self._target, self._aux_layers, self._config.data.cache_bits))
        fits = size * (held + tokens) <= self._config.data.cache_gb * 1e9 and size * tokens <= room
        return fits and None not in readers

    def _making(self, number: int, questions: tuple[tuple[str, str], ...]) -> MakeConfig:
        return MakeConfig(seed=self._config.run.seed * _SEEDS + number, questions=questions)

    @cached_property
    def _questions(self) -> dict[int, tuple[str, str]]:
        """The system prompts and first user turns in `--data`, by the hash that finds duplicates."""
        return {} if self._config.data.is_self else questions_of(self._target, self._config)

    def _own(self, held_out: bool, without: Collection[int] = ()) -> tuple[tuple[str, str], ...]:
        """Return the user's questions of one side of the split, `without` those with these keys."""
        held = held_out_prompts(self._questions)
        return tuple(x for key, x in self._questions.items() if (key in held) == held_out and key not in without)

    def _file(self, number: int) -> Path:
        return self._folder / f"{number:02d}.jsonl"

    def _shards(self, number: int) -> Path:
        return self._folder / f"{number:02d}.shards"
