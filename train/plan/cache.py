"""Where a run's hidden states are kept, by what there is room for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from eagle_mlx.errors import ConfigError, OutputError
from eagle_mlx.memory import free_memory
from eagle_mlx.shards import CacheChoice, ShardMeta, choose_cache, states_bytes, unfinished_folder
from eagle_mlx.shards.budget import Place, gb

from ..config import TrainConfig
from .memory import free_disk

_MEMORY_SHARE, _DISK_SHARE = 0.8, 0.95
"""What of the free memory and disk a cache may take: others need some too."""


_AS_ASKED: dict[Place, str] = {
    "memory": "captured once, kept in memory",
    "disk": "captured once, kept on the disk",
    "online": "captured anew for each batch",
}


def cache_folder(config: TrainConfig) -> Path:
    """Where states are kept on the disk; there an interrupted capture continues, and a later run finds them."""
    return Path(config.data.cache_dir or f"{config.run.output.rstrip('/')}.shards")


def choose_states(
    config: TrainConfig, tokens: int, meta: ShardMeta, reserve: int = 0, free: int | None = None
) -> CacheChoice:
    """Where so many tokens' states go, and the estimate in words.

    `reserve` is the memory in bytes that the training will take itself, `free` that of the machine, by default what is
    free on this one. Raises ConfigError or OutputError where
    `config.data.states` names a place that has too little room.
    """
    memory, disk = room(config, reserve, free_memory() if free is None else free)
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


def room(config: TrainConfig, reserve: int, free: int) -> tuple[float, float]:
    """Bytes of memory and of the disk that a cache may take.

    What its folder holds already counts as free, since a capture continues with it.
    """
    folder = cache_folder(config)
    held = sum(map(_size, (folder, unfinished_folder(folder))))
    return max(0.0, _MEMORY_SHARE * (free - reserve)), _DISK_SHARE * free_disk(folder) + held


def as_asked(config: TrainConfig, tokens: int, meta: ShardMeta) -> CacheChoice:
    """The place that `config.data.states` names, whatever room there is."""
    assert config.data.states != "auto"
    kept = meta if config.data.states == "disk" else replace(meta, bits=16)
    size = states_bytes(tokens, kept)
    what = f"hidden states of {tokens:,} tokens: {gb(size)} in {kept.bits} bits, {_AS_ASKED[config.data.states]}"
    return CacheChoice(config.data.states, size, what)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) if folder.is_dir() else 0
