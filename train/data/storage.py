"""Where a run keeps what it learns from: the conversations that the target makes up, and hidden states."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from eagle_mlx.errors import ConfigError, OutputError
from eagle_mlx.memory import free_memory, gb
from eagle_mlx.shards import ShardMeta, bytes_per_token, unfinished_folder

from ..config import TrainConfig

Place = Literal["memory", "disk", "online"]

_MEMORY_SHARE, _DISK_SHARE = 0.8, 0.95
"""Share of the free memory and disk that a cache may take."""
_AS_ASKED: dict[Place, str] = {
    "memory": "captured once, kept in memory",
    "disk": "captured once, kept on the disk",
    "online": "captured anew for each batch",
}


@dataclass(frozen=True)
class CacheChoice:
    place: Place
    """`memory` and `disk` are captured once; `online` is captured for each batch and keeps nothing."""
    size: int
    """Bytes that the states would take at `place`; for `online`, those that they would have taken on the disk."""
    text: str
    """The estimate and the choice in one line."""


def self_file(config: TrainConfig) -> Path:
    """Return the file of conversations that the target makes up; interrupted making continues there."""
    return Path(f"{config.run.output.rstrip('/')}.self.jsonl")


def sources_of(config: TrainConfig) -> tuple[str, ...]:
    """Return what the data are read from, with that file for `self`."""
    return (str(self_file(config)),) if config.data.is_self else config.data.sources


def learnt_whole(config: TrainConfig) -> bool:
    """Return whether all that the target makes up is learned from: nothing is left out when it is read."""
    data = config.data
    return data.is_self and not (data.limit or data.keep_turns or data.keep_tokens or data.dedupe != "none")


def keeps_states(config: TrainConfig, meta: ShardMeta, reserve: int = 0) -> bool:
    """Return whether hidden states are kept, on the disk, while the target makes up conversations.

    Making takes long and is interrupted, so its states go to the disk and never to memory alone. `reserve` as in
    `choose_states`, which raises if `--states disk` has too little room.
    """
    if not learnt_whole(config):
        return False
    choice = choose_states(config, config.data.self_tokens, meta, reserve)
    if config.data.states != "auto":
        return choice.place == "disk"
    size = config.data.self_tokens * bytes_per_token(meta)
    return choice.place != "online" and size <= _room(config, reserve, free_memory())[1]


def cache_folder(config: TrainConfig) -> Path:
    """Return the folder of hidden states on the disk; an interrupted capture continues there."""
    return Path(config.data.cache_dir or f"{config.run.output.rstrip('/')}.shards")


def choose_states(
    config: TrainConfig, tokens: int, meta: ShardMeta, reserve: int = 0, free: int | None = None
) -> CacheChoice:
    """Choose where so many tokens' states go, with the estimate in words.

    `reserve` is the memory in bytes that the training will take itself; `free` is that of the machine, by default what
    is free on this one. Raises ConfigError or OutputError if `config.data.states` names a place with too little room.
    """
    memory, disk = _room(config, reserve, free_memory() if free is None else free)
    if config.data.states == "auto":
        return choose_cache(tokens, meta, config.data.cache_gb * 1e9, memory, disk)
    choice = as_asked(config, tokens, meta)
    if choice.place == "memory" and choice.size > memory:
        raise ConfigError(
            f"{choice.text}: {gb(memory)} of memory are left for them; use less data (--limit, --max-length), or keep "
            "them elsewhere with --states disk"
        )
    if choice.place == "disk" and choice.size > disk:
        raise OutputError(
            f"{choice.text}: {gb(disk)} are left at {cache_folder(config).absolute()}; make room, name another place "
            "with --cache-dir, or use --cache-bits 8, less data (--limit, --max-length) or --states online"
        )
    return choice


def choose_cache(tokens: int, meta: ShardMeta, cache: float, memory: float, disk: float) -> CacheChoice:
    """Memory where the states in float16 fit into it, else the disk where `meta.bits` fit, else online.

    `cache` is the most that a cache may take anywhere, `memory` what of the memory is left for it, `disk` what is free
    where it would stand; all in bytes.
    """
    in_memory = tokens * bytes_per_token(replace(meta, bits=16))
    on_disk = tokens * bytes_per_token(meta)
    layers = len(meta.aux_layers) + 1
    what = f"hidden states of {tokens:,} tokens, {layers} layer{'s' * (layers > 1)} of {meta.hidden_size:,} values"
    if in_memory <= min(cache, memory):
        return CacheChoice("memory", in_memory, f"{what}: {gb(in_memory)} in 16 bits, captured once, kept in memory")
    if on_disk <= min(cache, disk):
        text = f"{what}: {gb(on_disk)} in {meta.bits} bits, captured once, kept on the disk"
        return CacheChoice("disk", on_disk, text)
    limit = f"the cache of {gb(cache)}" if cache <= disk else f"the {gb(disk)} that are free on the disk"
    text = f"{what}: {gb(on_disk)} in {meta.bits} bits, more than {limit}, so captured anew for each batch"
    return CacheChoice("online", on_disk, text)


def as_asked(config: TrainConfig, tokens: int, meta: ShardMeta) -> CacheChoice:
    """Return the place that `config.data.states` names, whatever room there is."""
    assert config.data.states != "auto"
    kept = meta if config.data.states == "disk" else replace(meta, bits=16)
    size = tokens * bytes_per_token(kept)
    what = f"hidden states of {tokens:,} tokens: {gb(size)} in {kept.bits} bits, {_AS_ASKED[config.data.states]}"
    return CacheChoice(config.data.states, size, what)


def free_disk(folder: str | Path) -> int:
    """Return the bytes that are free where a folder is or would be."""
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _room(config: TrainConfig, reserve: int, free: int) -> tuple[float, float]:
    """Return the bytes of memory and of the disk that a cache may take.

    What its folder holds already counts as free, because a capture continues with it.
    """
    folder = cache_folder(config)
    held = sum(map(_size, (folder, unfinished_folder(folder))))
    return max(0.0, _MEMORY_SHARE * (free - reserve)), _DISK_SHARE * free_disk(folder) + held


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) if folder.is_dir() else 0
