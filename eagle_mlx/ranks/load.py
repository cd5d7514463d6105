"""Load a target over all ranks that `mlx.launch` started. mlx-lm divides it; the result is checked."""

from __future__ import annotations

import atexit
import zlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.cache import RaggedCache
from eagle_mlx.cache.kinds import model_file
from eagle_mlx.errors import ConfigError, RanksError, TargetError
from eagle_mlx.ranks.channel import Channel, ProcessGroup
from eagle_mlx.ranks.commands import LeadingTarget, follow
from eagle_mlx.setting import RANK_SECONDS
from eagle_mlx.target import Target, fingerprint, load_target, setting_of

_PACKAGES = ("mlx", "mlx-lm", "eagle-mlx")  # packages whose versions must be the same on all ranks
_HEADS = ("num_attention_heads", "n_heads", "linear_num_key_heads", "linear_num_value_heads")
"""Head counts in a config that must be divisible by the number of ranks."""


def load_over_ranks(
    name: str | Path,
    shard: Literal["tensor", "pipeline"] = "tensor",
    timeout: float = RANK_SECONDS,
    when_loaded: Callable[[], object] = lambda: None,
    **arguments: Any,
) -> LeadingTarget:
    """Load this rank's part of a target; in rank 0, return the target to use.

    The other ranks follow until rank 0 ends, and then raise SystemExit. shard: whether each rank gets a part of every
    layer or some of the layers. when_loaded: called in the other ranks once their part is loaded. arguments: those of
    `load_target`. Raises ConfigError if there is only one process, TargetError if the target cannot be sharded,
    RanksError if ranks differ.
    """
    if arguments.get("adapter_path") is not None:
        raise TargetError("--adapter-path cannot be used with --shard; merge the adapters with mlx_lm.fuse")
    world = ProcessGroup.init()
    if world.group is None:
        raise ConfigError("--shard needs several processes; start them with mlx.launch (docs/several-machines.md)")
    divide = shard_tensors if shard == "tensor" else shard_layers
    target = load_target(name, shard=partial(divide, group=world.group), **arguments)
    _check_same("the versions of " + ", ".join(_PACKAGES), str([version(package) for package in _PACKAGES]), world)
    _check_same("the files of the target", fingerprint(target), world)
    check_readable(target)
    layers = sum(world.all_values(target.num_layers)) if shard == "pipeline" else None
    free = min(world.all_values(target.free_memory >> 20)) << 20
    channel = Channel(world, timeout)
    channel.watch()
    if not world.is_rank_zero:
        when_loaded()
        follow(target, channel)
        raise SystemExit(0)
    leading = LeadingTarget.of(target, channel, free, layers)
    atexit.register(leading.close)
    return leading


def _check_same(what: str, value: str, world: ProcessGroup) -> None:
    """Raise RanksError if a rank's value differs from rank 0's."""
    values = world.all_values(zlib.crc32(value.encode()) >> 1)
    if others := [rank for rank, other in enumerate(values) if other != values[0]]:
        ranks = ", ".join(map(str, others))
        raise RanksError(f"{what} differ: those of rank {ranks} are not those of rank 0 (here: {value})")


def check_readable(target: Target) -> None:
    """Raise TargetError if one cannot tell when all layers have been read. Nothing is computed."""
    if not target.norm_is_last:
        file = model_file(target.model)
        raise TargetError(
            f"models of type {file} cannot be sharded: their layers and final norm are not called one after another"
        )


def shard_tensors(model: nn.Module, group: mx.distributed.Group) -> None:
    """Reduce each layer to this rank's part, as mlx-lm divides it; embedding and output projection stay whole.

    Raises TargetError if mlx-lm has no tensor parallelism for the model, or it cannot be divided among the ranks.
    """
    file, size = model_file(model), group.size()
    if not hasattr(model, "shard"):
        raise TargetError(f"models of type {file} cannot be sharded: mlx-lm has no tensor parallelism for them")
    for name in _HEADS:
        count = setting_of(model, name)
        if isinstance(count, int) and count % size:
            raise TargetError(f"{size} ranks cannot share this target: its {name} is {count}; use a divisor of it")
    before = _widths(model)
    holder = next((module for module in model.modules() if "lm_head" in module), None)
    output = holder and holder.lm_head
    try:
        model.shard(group)
        if holder is not None and holder.lm_head is not output:  # rank 0 computes whole logits
            holder.lm_head, holder.sharding_group = output, None
        after = _widths(model)
    except Exception as e:  # shapes that cannot be divided raise anything
        raise TargetError(f"{size} ranks cannot share this target: {e}") from e
    if before != after:
        raise TargetError(f"{size} ranks cannot share this target: keys would be cut within a head")


def shard_layers(model: nn.Module, group: mx.distributed.Group) -> None:
    """Reduce the model to this rank's layers, as mlx-lm divides them: rank 0 has the last; all have embedding and norm.

    Raises TargetError if mlx-lm has no pipeline for the model, or there are fewer layers than ranks.
    """
    backbone = next((module for module in model.modules() if hasattr(module, "pipeline_layers")), None)
    if backbone is None:
        raise TargetError(f"models of type {model_file(model)} cannot be sharded: mlx-lm has no pipeline for them")
    if len(model.layers) < group.size():
        raise TargetError(f"{group.size()} ranks cannot share the {len(model.layers)} layers of this target")
    backbone.pipeline(group)


def _widths(model: nn.Module) -> list[int]:
    """Return the widths of all layers' keys and values. Nothing is computed: shapes are known beforehand."""
    cache = RaggedCache.local(model, 1)
    model(mx.zeros((1, 2), mx.int32), cache=list(cache))
    return [x.shape[-1] for part in cache.positional + cache.windows for x in part.state]
