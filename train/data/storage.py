"""Conversations that the target makes up for a run, and where a run stores them and hidden states."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from eagle_mlx.data_pipelines import (
    DataConfig,
    MakeConfig,
    Wanted,
    check_conversations,
    make_once,
    place_of,
    public_source,
    read_conversations,
)
from eagle_mlx.errors import ConfigError, DataError, OutputError
from eagle_mlx.files import free_disk, write_output
from eagle_mlx.hub import public_name
from eagle_mlx.memory import free_memory, gb
from eagle_mlx.shards import ShardMeta, bytes_per_token, unfinished_folder
from eagle_mlx.target import Target

from ..config import TrainConfig
from ..distributed import SINGLE_PROCESS, World

Place = Literal["memory", "disk", "online"]

_MEMORY_SHARE, _DISK_SHARE = 0.8, 0.95  # share of free memory and disk that the cache may use
IN_WORDS: dict[Place, str] = {
    "memory": "captured once, kept in memory",
    "disk": "captured once, kept on disk",
    "online": "captured for each batch",
}


@dataclass(frozen=True)
class CacheChoice:
    place: Place  # `memory` and `disk` capture once; `online` captures for each batch and keeps nothing
    size: int  # bytes of the hidden states at `place`; for `online`, the bytes that they would need on disk
    text: str  # the estimate and the choice in one line


def self_file(config: TrainConfig) -> Path:
    """Return the file of conversations that the target makes up; an interrupted run continues it."""
    return Path(f"{config.run.output.rstrip('/')}.self.jsonl")


def sources_of(config: TrainConfig) -> tuple[str, ...]:
    """Return the data sources; `self` is replaced by the file of the target's conversations."""
    return (str(self_file(config)),) if config.data.is_self else config.data.sources


def cache_folder(config: TrainConfig) -> Path:
    """Return the folder of hidden states on disk; an interrupted capture continues there."""
    return Path(config.data.cache_dir or f"{config.run.output.rstrip('/')}.shards")


def choose_states(
    config: TrainConfig, tokens: int, meta: ShardMeta, reserve: int = 0, free: int | None = None
) -> CacheChoice:
    """Choose where to keep the hidden states of `tokens` tokens, with an estimate in words.

    Without `config.data.states`, it is memory if the 16-bit states fit, else disk if they fit in `meta.bits`, else
    online. `reserve`: bytes that training needs; `free`: bytes, by default this machine's free memory. Raises
    ConfigError or OutputError if the place in `config.data.states` does not have enough room.
    """
    folder, place = cache_folder(config), config.data.states
    memory = max(0.0, _MEMORY_SHARE * ((free_memory() if free is None else free) - reserve))
    # Existing files of the cache count as free, because a capture continues with them.
    held = [file for part in (folder, unfinished_folder(folder)) for file in part.glob("*") if file.is_file()]
    disk = _DISK_SHARE * free_disk(folder) + sum(file.stat().st_size for file in held)
    in_memory, on_disk = _choice("memory", tokens, meta), _choice("disk", tokens, meta)
    if place is None:
        cache = config.data.cache_gb * 1e9
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
    return CacheChoice(place, size, f"{what}: {gb(size)} in {bits} bits, {why}{IN_WORDS[place]}")


def make_data(target: Target, config: TrainConfig, world: World = SINGLE_PROCESS) -> None:
    """Create the file of conversations on every machine; rank 0 makes it unless it exists.

    Raises OutputError if other data is in the way, DataError if the target writes nothing usable, TargetError if it
    cannot write user turns, ConfigError if the settings could not read the file.
    """
    file, making = self_file(config), MakeConfig(seed=config.run.seed)
    data_config(config)  # report invalid settings now, not hours later
    if world.is_rank_zero:
        wanted = Wanted(tokens=config.data.self_tokens)
        try:
            report = make_once(target, making, wanted, file, progress=True)
        except KeyboardInterrupt:
            print("the conversations so far are kept; the same command continues", file=sys.stderr)
            raise
        mx.clear_cache()  # training does not need the KV cache
        print(f"{file}: {report.summary() if report is not None else 'already complete'}", file=sys.stderr)
    if world.size == 1:
        return
    # If each machine made the file, rounding differences could give different texts.
    text: str = world.broadcast(file.read_text(encoding="utf-8") if world.is_rank_zero else None)
    if not world.is_rank_zero and not (file.exists() and file.read_text(encoding="utf-8") == text):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_output(file, text)


def check_data(config: TrainConfig) -> None:
    """Read the sources of a run that exist already, so that their DataError or ConfigError shows before any work."""
    data, learned = config.data, data_config(config)
    is_read = not (data.shards or data.is_self)
    in_files = is_read and not config.optimization.hours and all(source.kind == "file" for source in learned.parsed)
    if is_read:
        check_conversations(learned, "train", answers=not config.optimization.hours)
    if not config.prompts_are_heldout:
        check_conversations(learned.alone(config.evaluation.data), "all")
    elif in_files and next(read_conversations(replace(learned, keep_tokens=""), "heldout"), None) is None:
        raise no_prompts(data.sources, "all conversations have the same prompt, so none is held out")


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
        **dict.fromkeys(("target", "init_from"), public_name),
        **dict.fromkeys(("data", "eval_data"), public_source),
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
    data = config.data
    return DataConfig(sources_of(config), data.map, data.limit or 0, config.run.seed, **data.filters.flat())
