"""What of a target and a head decides what a run takes; read from their arrays' shapes, so no weight need be loaded."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from eagle_mlx.errors import TargetError
from eagle_mlx.heads.eagle import EagleConfig, EagleHead
from eagle_mlx.heads.eagle3 import Eagle3Head
from eagle_mlx.heads.mtp import MTPHead
from eagle_mlx.target import Target

from ..config import TrainConfig
from ..kinds import KINDS, Head, kind_of
from ..kinds.initial import head_config, layer_shape
from ..kinds.mtp import mtp_config

_EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "top_k_experts", "num_experts_per_token", "moe_top_k")


@dataclass(frozen=True)
class TargetShape:
    name: str
    layers: int
    hidden_size: int
    vocab_size: int
    inner: int
    """Width of the MLP, or of the experts that a token passes through."""
    parameters: int
    used: int
    """Parameters of the layers that a token passes through."""
    weights: int
    """Bytes of all weights, in the type in which the machine computes."""
    value: int
    """Bytes of a value that the target computes."""


@dataclass(frozen=True)
class HeadShape:
    kind: str
    title: str
    hidden_size: int
    inner: int
    heads: int
    draft_vocab: int
    aux_layers: tuple[int, ...]
    parameters: int
    """Those that are trained."""
    largest: int
    """Of these, the ones of the largest matrix."""
    projections: int
    """Of these, the output projection and what reads the hidden states once, before the draft steps."""
    gathered: bool
    """Whether `unroll/eagle3.py` computes its draft steps, where loss comes from, and not `unroll/feedback.py`."""


def described_target(name: str, model: Mapping[str, Any]) -> Target:
    """A target without weights, from the fields of its config.json. Nothing of it may be computed.

    `quantization` is applied to every matrix; with `experts` in it, other settings for those of a mixture of experts.
    Raises TargetError where mlx-lm knows no such model.
    """
    how = dict(model.get("quantization", {}))
    experts = how.pop("experts", how)
    with tempfile.TemporaryDirectory() as folder:
        fields = {key: value for key, value in model.items() if key != "quantization"}
        (Path(folder) / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        try:
            made, _ = load_model(Path(folder), lazy=True, strict=False)
        except (ValueError, KeyError, TypeError) as e:
            raise TargetError(f"{name} is described as a model that mlx-lm cannot make: {e}") from e
    made.set_dtype(mx.bfloat16)
    if how:

        def choose(path: str, part: nn.Module) -> bool | dict[str, Any]:
            chosen = experts if _is_switch(part) else how
            return hasattr(part, "to_quantized") and part.weight.shape[-1] % chosen["group_size"] == 0 and chosen

        nn.quantize(made, class_predicate=choose)
    return Target(made, name=name)


def shape_of_target(target: Target, floats: int | None = None) -> TargetShape:
    """What its arrays' shapes say; `floats` are the bytes of a number where the machine decides, and not the file."""
    args = _args(target)
    count = _first(args, _EXPERTS_OF_A_TOKEN) or 1
    inner = int(_first(args, ("intermediate_size",)) or 3 * target.hidden_size)
    if any(_is_switch(part) for _, part in target.model.named_modules()):
        own = int(_first(args, ("moe_intermediate_size",)) or inner)
        inner = count * own + int(_first(args, ("shared_expert_intermediate_size",)) or 0)
    leaves = [leaf for _, leaf in cast("list[tuple[str, mx.array]]", tree_flatten(target.model.parameters()))]
    return TargetShape(
        name=target.name,
        layers=target.num_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        inner=inner,
        parameters=sum(_parameters(part) for _, part in target.model.named_modules()),
        used=sum(_used(layer, count) for layer in target.model.layers),
        weights=sum(leaf.size * (floats or leaf.dtype.size) if _floating(leaf) else leaf.nbytes for leaf in leaves),
        value=floats or target.dtype.size,
    )


def blank_head(target: Target, config: TrainConfig) -> Head:
    """A head of the shape that the settings ask for, without values. Raises ConfigError where there is no such.

    Of a head to continue from, whose draft vocabulary is not known yet, the usual size of that is taken.
    """
    if config.head.kind == "mtp":
        return MTPHead(mtp_config(target))
    if config.head.kind == "eagle":
        return EagleHead(EagleConfig(**layer_shape(target, config)))
    wanted = config.head.draft_vocab or (
        KINDS[config.head.kind].defaults["draft_vocab"] if config.head.init_from else 0
    )
    size = wanted if 0 < wanted < target.vocab_size else target.vocab_size
    d2t = mx.zeros(size, mx.int32) if size < target.vocab_size else None
    return Eagle3Head(head_config(target, config, size), d2t)


def shape_of_head(head: Head, target: Target) -> HeadShape:
    shape: Any = head.config
    fields = shape.layer if isinstance(head, MTPHead) else None
    fields = {**fields, **fields.get("text_config", {})} if fields is not None else vars(shape)
    weights = cast("list[tuple[str, mx.array]]", tree_flatten(head.trainable_parameters()))
    once = ("lm_head", "fc.", "eh_proj")
    feedback = not isinstance(head, Eagle3Head) or shape.num_hidden_layers > 1
    hidden = target.hidden_size if isinstance(head, MTPHead) else shape.hidden_size
    kind = kind_of(head)
    return HeadShape(
        kind=kind.name,
        title=kind.title,
        hidden_size=hidden,
        inner=shape_of_target(target).inner if isinstance(head, MTPHead) else shape.intermediate_size,
        heads=int(fields["num_attention_heads"]),
        draft_vocab=shape.draft_vocab_size if isinstance(head, Eagle3Head) else target.vocab_size,
        aux_layers=kind.aux_layers_of(head),
        parameters=sum(weight.size for _, weight in weights),
        largest=max(weight.size for _, weight in weights),
        projections=sum(weight.size for name, weight in weights if name.startswith(once)),
        gathered=not feedback,
    )


def _used(layer: nn.Module, experts: int) -> int:
    total = 0
    for _, part in layer.named_modules():
        count = _parameters(part)
        total += count * experts // part.weight.shape[0] if _is_switch(part) and count else count
    return total


def _parameters(part: nn.Module) -> int:
    """Parameters that a module itself holds, quantised ones as what they stand for."""
    own = {name: leaf for name, leaf in part.items() if isinstance(leaf, mx.array) and not name.startswith("_")}
    if "scales" in own:
        packed = own.pop("weight")
        own.pop("scales")
        own.pop("biases", None)
        return int(packed.size * 32 // part.bits) + sum(leaf.size for leaf in own.values())
    return sum(leaf.size for leaf in own.values())


def _is_switch(part: nn.Module) -> bool:
    return type(part).__name__ in ("SwitchLinear", "QuantizedSwitchLinear")


def _floating(leaf: mx.array) -> bool:
    return bool(mx.issubdtype(leaf.dtype, mx.floating))


def _args(target: Target) -> Any:
    model: Any = target.model
    inside = getattr(model, "language_model", None)
    args = getattr(inside, "args", None) or getattr(model, "args", None)
    return getattr(args, "text_config", None) or args


def _first(args: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = args.get(name) if isinstance(args, dict) else getattr(args, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
