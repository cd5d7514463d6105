"""What a server may load: one model, or several that share a budget of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from eagle_mlx import hub, memory
from eagle_mlx.errors import ConfigError
from eagle_mlx.memory import gb

from ..speculation import AUTO, NO_HEAD
from .loader import LoadConfig, load
from .service import Source

Say = Callable[[str], None]


def single(name: str, config: LoadConfig, say: Say) -> Source:
    """A model that is alone."""
    return Source(name, lambda: load(config, say), config.max_batch)


def several(configs: Mapping[str, LoadConfig], nbytes: int, say: Say) -> list[Source]:
    """Models that share so many bytes.

    Whose file says nothing of keys and values gets an equal part of half the budget for them, or what its weights leave
    where that is less. So what a model takes does not depend on who is there. Raises ConfigError for one that is on
    this machine and would not fit if it were alone.
    """
    for name, config in configs.items():
        if Path(config.target).is_dir() and (needed := _sized(config, nbytes, len(configs))[1]) > nbytes:
            raise ConfigError(
                f"model {name!r} takes {gb(needed)} with its keys and values, but there are {gb(nbytes)} for all "
                "models; give more with --memory-gb, or leave it out"
            )
    return [_shared(name, config, nbytes, len(configs), say) for name, config in configs.items()]


def budget(given: int | None) -> int:
    """Return the bytes for all models: those that are given, or a share of what is free."""
    return memory.models_bytes(memory.free_memory()) if given is None else given


def _shared(name: str, config: LoadConfig, nbytes: int, count: int, say: Say) -> Source:
    def about(text: str) -> None:
        say(f"{name}: {text}")

    return Source(
        name,
        lambda: load(_sized(config, nbytes, count)[0], about),
        config.max_batch,
        lambda: _sized(config, nbytes, count)[1],
    )


def _sized(config: LoadConfig, nbytes: int, count: int) -> tuple[LoadConfig, int]:
    """The config with bytes for keys and values, and what the model takes with them. Fetches what is not here."""
    weights = weights_bytes(config)
    share = max(1, min(nbytes // 2 // count, nbytes - weights))
    kv = share if config.kv_bytes is None else config.kv_bytes
    return replace(config, kv_bytes=kv), weights + kv


def weights_bytes(config: LoadConfig) -> int:
    """Bytes of the files of weights: the target's, and those of the head or draft model that is named.

    A head that is looked for is not among them. Raises EagleError where a model cannot be had.
    """
    speculation = config.speculation
    head = None if speculation.head in (AUTO, NO_HEAD) else speculation.head
    named = [config.target, *(place for place in (head, speculation.draft_model) if place is not None)]
    return sum(_files_bytes(hub.resolve(place, config.options.trust_remote_code)) for place in named)


def _files_bytes(folder: Path) -> int:
    files = list(folder.glob("*.safetensors")) or list(folder.glob("*.bin"))
    return sum(file.stat().st_size for file in files)
