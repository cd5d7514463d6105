"""What a server may load: one model, or several that share a budget of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from eagle_mlx import hub, memory
from eagle_mlx.errors import ConfigError, TargetError
from eagle_mlx.formats.tensors import check_length
from eagle_mlx.memory import gb
from eagle_mlx.target_options import TargetOptions

from ..speculation import AUTO, NO_HEAD
from .loader import LoadConfig, load, load_target
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
        lambda: check_files(config),
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
    return sum(file.stat().st_size for folder in _folders(config) for file in _weights(folder))


def check_files(config: LoadConfig) -> None:
    """Raise an EagleError if a model that is named cannot be loaded from its files.

    Reads configs, tokenizer and the headers of weights, and so takes little time and memory. Another model is unloaded
    only after this.
    """
    for folder in _folders(config):
        if not (files := _weights(folder)):
            raise TargetError(f"{folder} has no weights; fetch or make them again")
        for file in files:
            if file.suffix == ".safetensors":
                check_length(file)
    load_target(config, lazy=True)
    if config.speculation.draft_model is not None:
        TargetOptions().load(config.speculation.draft_model, lazy=True)


def _folders(config: LoadConfig) -> list[Path]:
    """The folders of the target, and of the head or draft model that is named. Fetches what is not here."""
    speculation = config.speculation
    head = None if speculation.head in (AUTO, NO_HEAD) else speculation.head
    named = [config.target, *(place for place in (head, speculation.draft_model) if place is not None)]
    return [hub.resolve(place, config.options.trust_remote_code) for place in named]


def _weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
