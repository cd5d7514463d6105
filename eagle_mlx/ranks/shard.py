"""Each rank's part of a target: mlx-lm's own tensor parallelism and pipelines, checked."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.cache import RaggedCache
from eagle_mlx.cache.kinds import model_file
from eagle_mlx.errors import TargetError

_HEADS = ("num_attention_heads", "n_heads", "linear_num_key_heads", "linear_num_value_heads")
"""Counts of a config that every rank has as many of."""


def shard_tensors(model: nn.Module, group: mx.distributed.Group) -> None:
    """Leave of each layer this rank's part, as mlx-lm divides it; embedding and output projection stay whole.

    Raises TargetError where mlx-lm cannot, or the layers cannot be divided by so many ranks.
    """
    file, size = model_file(model), group.size()
    if not hasattr(model, "shard"):
        raise TargetError(f"models of type {file} cannot be sharded: mlx-lm has no tensor parallelism for them")
    args = getattr(model, "args", None)
    args = getattr(args, "text_config", None) or args
    counts = {name: _number(args, name) for name in _HEADS}
    for name, count in counts.items():
        if count is not None and count % size:
            raise TargetError(f"{size} ranks cannot share this target: its {name} is {count}; use a divisor of it")
    whole, before = _output_of(model), _widths(model)
    try:
        model.shard(group)
        _restore_output(model, whole)
        after = _widths(model)
    except Exception as e:  # whatever shapes do when they cannot be divided
        raise TargetError(f"{size} ranks cannot share this target{_key_heads(args)}: {e}") from e
    if before != after:
        raise TargetError(f"{size} ranks cannot share this target{_key_heads(args)}: keys would be cut within a head")


def shard_layers(model: nn.Module, group: mx.distributed.Group) -> None:
    """Leave this rank's layers, as mlx-lm divides them: rank 0 has the last ones; embedding and norm are everywhere.

    Raises TargetError where mlx-lm cannot, or there are fewer layers than ranks.
    """
    backbone = next((each for each in model.modules() if hasattr(each, "pipeline_layers")), None)
    if backbone is None:
        raise TargetError(f"models of type {model_file(model)} cannot be sharded: mlx-lm has no pipeline for them")
    if len(model.layers) < group.size():
        raise TargetError(f"{group.size()} ranks cannot share the {len(model.layers)} layers of this target")
    backbone.pipeline(group)


def _widths(model: nn.Module) -> list[int]:
    """How wide the keys and values of each layer are. Nothing is computed: shapes are known before."""
    cache = RaggedCache.local(model, 1)
    model(mx.zeros((1, 2), mx.int32), cache=list(cache))
    return [x.shape[-1] for part in cache.positional + cache.windows for x in part.state]


def _output_of(model: nn.Module) -> tuple[Any, Any]:
    """The module that holds the output projection, and this, where there is one."""
    holder = next((each for each in model.modules() if "lm_head" in each), None)
    return holder, holder and holder.lm_head


def _restore_output(model: nn.Module, whole: tuple[Any, Any]) -> None:
    """Heads ask the output projection for logits of their own, in rank 0 alone: it is whole everywhere."""
    holder, output = whole
    if holder is not None and holder.lm_head is not output:
        holder.lm_head, holder.sharding_group = output, None


def _number(args: Any, name: str) -> int | None:
    value = args.get(name) if isinstance(args, dict) else getattr(args, name, None)
    return value if isinstance(value, int) else None


def _key_heads(args: Any) -> str:
    count = _number(args, "num_key_value_heads")
    return "" if count is None else f" of {count} key heads"
