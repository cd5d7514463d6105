"""Conversations that the target makes up for a run, and where a run stores them and hidden states."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import mlx.core as mx

from eagle_mlx.data_pipelines import (
    DataConfig,
    MakeConfig,
    MakeLimits,
    RegenerateConfig,
    Split,
    Wanted,
    check_conversations,
    growing_engine,
    make_to_file,
    once,
    place_of,
    public_source,
    read_conversations,
    regenerate_to_file,
    text_settings,
)
from eagle_mlx.errors import ConfigError, DataError, OutputError
from eagle_mlx.files import check_apart, free_disk, write_output
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.hub import public_name
from eagle_mlx.memory import free_memory, gb
from eagle_mlx.paired import FEWEST
from eagle_mlx.progress import counted
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.shards import ShardMeta, bytes_per_token, read_manifest, unfinished_folder
from eagle_mlx.target import Target
from eagle_mlx.text import LEAST_DISTINCT

from ..config import TrainConfig
from ..distributed import World

Place = Literal["memory", "disk", "online"]
C = TypeVar("C", bound=TrainConfig)

_MEMORY_SHARE, _DISK_SHARE = 0.8, 0.95  # share of free memory and disk that the cache may use
_IN_WORDS: dict[Place, str] = {
    "memory": "captured once, kept in memory",
    "disk": "captured once, kept on disk",
    "online": "captured for each batch",
}


@dataclass(frozen=True)
class CacheChoice:
    place: Place  # `memory` and `disk` capture once; `online` captures for each batch and keeps nothing
    size: int  # bytes of the hidden states at `place`; for `online`, the bytes that they would need on disk
    text: str  # the estimate and the choice in one line

    @property
    def states(self) -> str:
        return _IN_WORDS[self.place]


def self_file(config: TrainConfig) -> Path:
    """Return the file of conversations that the target makes up or answers; an interrupted run continues it."""
    return Path(f"{config.run.output.rstrip('/')}.self.jsonl")


def replay_file(config: TrainConfig) -> Path:
    return Path(f"{config.run.output.rstrip('/')}.replay.jsonl")


def sources_of(config: TrainConfig) -> tuple[str, ...]:
    """Return the data sources; `self` and prompts are replaced by the file of the target's conversations."""
    return (str(self_file(config)),) if config.data.is_self or config.data.prompts else config.data.sources


def cache_folder(config: TrainConfig) -> Path:
    """Return the folder of hidden states on disk; an interrupted capture continues there."""
    return Path(config.data.cache_dir or f"{config.run.output.rstrip('/')}.shards")


def choose_states(
    config: TrainConfig,
    tokens: int,
    meta: ShardMeta,
    reserve: int = 0,
    free: int | None = None,
    most: float = math.inf,
) -> CacheChoice:
    """Choose where to keep the hidden states of `tokens` tokens, with an estimate in words.

    Without `config.data.states`, it is memory if the 16-bit states fit, else disk if they fit in `meta.bits`, else
    online, as for more than the `most` tokens that the run has time to capture and learn. `reserve`: bytes that
    training needs; `free`: bytes, by default this machine's free memory. Raises ConfigError or OutputError if the place
    in `config.data.states` does not have enough room.
    """
    folder, place = cache_folder(config), config.data.states
    memory = max(0.0, _MEMORY_SHARE * ((free_memory() if free is None else free) - reserve))
    # Existing files of the cache count as free, because a capture continues with them.
    held = [file for part in (folder, unfinished_folder(folder)) for file in part.glob("*") if file.is_file()]
    disk = _DISK_SHARE * free_disk(folder) + sum(file.stat().st_size for file in held)
    in_memory, on_disk = _choice("memory", tokens, meta), _choice("disk", tokens, meta)
    cache = config.data.cache_gb * 1e9
    if place is None and tokens > most:
        return _choice("online", tokens, meta, "more than there is time to learn, so ")
    if place is None:
        if in_memory.size <= min(cache, memory):
            return in_memory
        if on_disk.size <= min(cache, disk):
            return on_disk
        limit = f"the cache of {gb(cache)}" if cache <= disk else f"the {gb(disk)} free on the disk"
        return _choice("online", tokens, meta, f"more than {limit}, so ")
    if place == "memory" and in_memory.size > memory:
        raise ConfigError(
            f"{in_memory.text}: {gb(memory)} of memory are free; use less data (--limit, --max-length) or --states disk"
        )
    if place == "disk" and on_disk.size > disk:
        raise OutputError(
            f"{on_disk.text}: {gb(disk)} are free at {folder.absolute()}; free some space, choose another --cache-dir, "
            "or use --cache-bits 8, less data (--limit, --max-length) or --states online"
        )
    return _choice(place, tokens, meta)


def _choice(place: Place, tokens: int, meta: ShardMeta, why: str = "") -> CacheChoice:
    bits = 16 if place == "memory" else meta.bits
    size = tokens * bytes_per_token(replace(meta, bits=bits))
    layers = len(meta.aux_layers) + 1
    what = f"hidden states of {tokens:,} tokens, {layers} layer{'s' * (layers > 1)} of {meta.hidden_size:,} values"
    return CacheChoice(place, size, f"{what}: {gb(size)} in {bits} bits, {why}{_IN_WORDS[place]}")


def make_data(
    target: Target, config: TrainConfig, world: World, file: Path, wanted: Wanted, limits: MakeLimits
) -> None:
    """Create a file of conversations on every machine; rank 0 makes it unless it exists.

    Raises OutputError if other data is in the way, DataError if the target writes nothing usable, TargetError if it
    cannot write user turns, ConfigError if the settings could not read the file.
    """
    data_config(config)  # report invalid settings now, not hours later
    making = MakeConfig(seed=config.run.seed)

    def make() -> str:
        return make_to_file(growing_engine(target), making, wanted, file, progress=True, limits=limits).summary()

    _on_every_machine(file, {**text_settings(target), **asdict(making), **asdict(wanted)}, world, make)


def answer_prompts(
    target: Target, config: TrainConfig, head: DraftHead, world: World, over: Callable[[], bool]
) -> None:
    """Have the target answer `config.data.prompts`, greedily as the judge does, with drafts of `head`.

    Prompts that are held out stay unanswered, since the judge decodes them. `over`: called before each prompt after the
    first batch; once true, the rest stays unanswered, too. Raises as `make_data`, and DataError if all answers loop.
    """
    file, reading = self_file(config), prompt_config(config)
    prompts = list(read_conversations(reading, "train", target.tokenizer))
    digest = hashlib.blake2s(" ".join(f"{prompt.whole_key():x}" for prompt in prompts).encode()).hexdigest()[:16]
    settings = {**asdict(reading), "prompts": digest}

    def make() -> str:
        params = SamplingParams(temperature=0.0, max_tokens=MakeConfig.max_tokens)
        answers = RegenerateConfig(params, least_distinct=LEAST_DISTINCT)
        engine = growing_engine(target, head)
        first = engine.max_batch

        def enough(begun: int) -> bool:
            return begun >= first and over()

        count, report = regenerate_to_file(engine, prompts, answers, file, settings, progress=True, enough=enough)
        if not report.answers:
            raise DataError(f"{', '.join(reading.sources)}: all of the target's answers loop; give other prompts")
        left = len(prompts) - count - report.dropped
        return f"{counted(report.answers, 'answer')} of {counted(report.tokens, 'token')}; {report.looping:,} loop" + (
            f"; no time was left for {counted(left, 'prompt')}" if left else ""
        )

    _on_every_machine(file, {**text_settings(target), **settings}, world, make)


def _on_every_machine(file: Path, settings: Mapping[str, Any], world: World, make: Callable[[], str]) -> None:
    """Let rank 0 `make` a file, unless one with these settings exists, and give all machines its text."""
    if world.is_rank_zero:
        try:
            made = once(file, settings, make)
        except KeyboardInterrupt:
            print("the conversations so far are kept; the same command continues", file=sys.stderr)
            raise
        mx.clear_cache()  # training does not need the KV cache
        print(f"{file}: {made or 'used as it is; move it away to make it again'}", file=sys.stderr)
    if world.size == 1:
        return
    # If each machine made the file, rounding differences could give different texts.
    text: str = world.broadcast(file.read_text(encoding="utf-8") if world.is_rank_zero else None)
    if not world.is_rank_zero and not (file.exists() and file.read_text(encoding="utf-8") == text):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_output(file, text)


def check_data(config: TrainConfig) -> None:
    """Read the sources of a run that exist already, so that their DataError or ConfigError shows before any work.

    Of shards, only the manifests are read. Raises ShardError for a folder without one.
    """
    data, learned = config.data, prompt_config(config)
    is_read = not (data.shards or data.is_self)
    in_files = is_read and not config.optimization.hours and all(source.kind == "file" for source in learned.parsed)
    if is_read:
        check_conversations(learned, "train", answers=not (config.optimization.hours or data.prompts))
    measured = replace(learned, keep_tokens="")  # tokens are counted once the target is loaded
    if not config.prompts_are_heldout:
        measured = measured.alone(config.evaluation.data)
        check_conversations(measured, "all")
    replayed = data_config(of_replay(config)).parsed if data.replay else []
    read = [source.name for source in (*learned.parsed, *measured.parsed, *replayed)]
    check_apart(config.run.output, config.head.target, *data.shards, *read)
    for folder in data.shards:
        read_manifest(Path(folder))
    if in_files or (config.head.adapt and not config.prompts_are_heldout):
        held_out = read_conversations(measured, "heldout" if config.prompts_are_heldout else "all")
        _check_held_out(config, sum(1 for _ in islice(held_out, FEWEST)))
    if data.replay:
        check_conversations(data_config(of_replay(config)), "train", answers=True)


def _check_held_out(config: TrainConfig, count: int) -> None:
    """Raise DataError if so few prompts are held out that acceptance cannot be measured, or the judge cannot decide."""
    sources = prompt_config(config).sources if config.prompts_are_heldout else (config.evaluation.data,)
    if not count:
        raise no_prompts(sources, "all conversations have the same prompt, so none is held out")
    if config.head.adapt and count < FEWEST:
        raise DataError(
            f"{', '.join(sources)}: {counted(count, 'prompt')} held out, but the judge needs at least {FEWEST}; give "
            "more than 50 prompts, of which one in ten is held out, or name other prompts with --eval-data"
        )


def no_prompts(sources: Sequence[str], reason: str) -> DataError:
    return DataError(
        f"{', '.join(sources)}: no held-out conversations to measure acceptance ({reason}); choose other prompts with "
        "--eval-data"
    )


def public_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings for files that others get: models by their public names, other paths by their last part."""

    def public_map(text: str) -> str:
        place = place_of(text)
        return f"{public_source(place)}:{text[len(place) + 1 :]}" if place else text

    changes: dict[str, Callable[[str], str]] = {
        **dict.fromkeys(("target", "init_from", "adapt"), public_name),
        **dict.fromkeys(("data", "prompts", "replay", "eval_data"), public_source),
        **dict.fromkeys(("output", "shards", "cache_dir", "adapter_path"), lambda path: Path(path).name),
        "map": public_map,
        "chat_template": lambda text: text if "{" in text else Path(text).name,
    }
    values = config.flat()
    for name, change in changes.items():
        if value := values[name]:
            values[name] = change(value) if isinstance(value, str) else tuple(map(change, value))
    return values


def data_config(config: TrainConfig) -> DataConfig:
    """Return what a run learns: the target's answers to `prompts`, if there are any, or the data."""
    if config.data.prompts:
        return DataConfig(sources_of(config), seed=config.run.seed)
    return prompt_config(config)


def learned_side(config: TrainConfig) -> Split:
    """Return the part of `data_config` that a run learns. All answers are learned: held-out prompts have none."""
    return "all" if config.data.prompts else "train"


def prompt_config(config: TrainConfig) -> DataConfig:
    """Return what a run reads: the prompts, as they are before the target answers them, or the data."""
    data = config.data
    sources = data.prompts or sources_of(config)
    return DataConfig(sources, data.map, data.limit, config.run.seed, **data.filters.flat())


def of_replay(config: C) -> C:
    """Return the settings with the older conversations as the only data."""
    sources = config.data.replay or (str(replay_file(config)),)
    return config.changed(data=sources, prompts=(), map=(), eval_data="", limit=None)
