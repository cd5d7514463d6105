"""The least that a run takes, from shapes alone: a run that cannot fit is refused before its target is loaded."""

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

from eagle_mlx.data_pipelines import MakeConfig, beginning, steerable
from eagle_mlx.errors import ConfigError, OutputError, TargetError
from eagle_mlx.memory import free_memory, gb
from eagle_mlx.target import Target, compute_dtype

from ..config import TrainConfig, flag
from ..data import free_disk
from ..kinds import KINDS, Head, resolved
from ..kinds.least_squares import bytes_of

FLOAT = 4
"""Bytes of a weight, a moment and a gradient, which are in float32."""
PROGRAM = 250_000_000
"""Bytes that Python and the libraries take besides MLX's arrays."""
MOST = 0.95
"""Share of the free memory that a run may take."""


@dataclass(frozen=True)
class Bound:
    """What a run takes at least. Activations come on top of it; a probe measures them (`probe.py`)."""

    config: TrainConfig
    """Resolved."""
    target: Target
    """Without weights: nothing of it may be computed."""
    head: Head
    """Without values, of the shape that is trained."""

    @property
    def weights(self) -> int:
        """Bytes of the target's weights, in the type in which this machine computes."""
        dtype = compute_dtype()
        return sum(
            leaf.size * dtype.size if dtype is not None and mx.issubdtype(leaf.dtype, mx.floating) else leaf.nbytes
            for leaf in leaves(self.target.model.parameters())
        )

    @property
    def trained(self) -> int:
        """Numbers of the head that are trained."""
        return sum(leaf.size for leaf in leaves(self.head.trainable_parameters()))

    @property
    def training(self) -> int:
        """Bytes of the head's weights, gradients and moments, or of its linear start if that takes more."""
        moments = 2 if self.config.optimization.optimizer == "adamw" else 1
        return FLOAT * self.trained + max((1 + moments) * FLOAT * self.trained, self._start)

    @property
    def memory(self) -> int:
        """Bytes of memory."""
        return self.weights + self.training + PROGRAM

    @property
    def heads_on_disk(self) -> int:
        """Bytes of `best` and `last`."""
        return 2 * FLOAT * self.trained

    @property
    def checkpoints_on_disk(self) -> int:
        """Bytes of the states to resume from, one of them while it is written."""
        return (self.config.run.checkpoints + 1) * 3 * FLOAT * self.trained

    @property
    def _start(self) -> int:
        config = self.config.head
        if config.start != "linear" or config.init_from:
            return 0
        layers = KINDS[config.kind].aux_layers_of(self.head)
        width = max(1, len(layers)) * self.target.hidden_size + self.head.hidden_size
        return bytes_of(width, self.head.hidden_size)

    def check(self, free: int | None = None) -> None:
        """Raise ConfigError or OutputError, with what would help, if memory or disk is too small.

        `free`: bytes of memory, by default those of this machine.
        """
        free = free_memory() if free is None else free
        if self.memory > MOST * free:
            raise ConfigError(
                f"this run takes at least {gb(self.memory)} of memory (target {gb(self.weights)}, training "
                f"{gb(self.training)}, program {gb(PROGRAM)}), and {gb(free)} are free; use {self._remedy(free)}"
            )
        needed, folder = self.heads_on_disk + self.checkpoints_on_disk, self.config.run.output
        room = free_disk(folder)
        if needed > room:
            raise OutputError(
                f"{folder} will hold {gb(needed)} ({gb(self.heads_on_disk)} of heads, {gb(self.checkpoints_on_disk)} "
                f"of states to resume from), and {gb(room)} are free there; make room, name another --output, or keep "
                "fewer --checkpoints"
            )

    def _remedy(self, free: int) -> str:
        foreign = KINDS[self.config.head.kind].foreign
        smaller = [] if self.weights + PROGRAM > MOST * free else ["intermediate_size", "draft_vocab"]
        own = [f"a smaller {flag(name)}" for name in smaller if name not in foreign]
        return " or ".join([*own, "a smaller or more strongly quantised --target"])


def bound_of(config: TrainConfig, target: Target | None = None) -> Bound:
    """Return what a run with these settings takes at least.

    `target`: one without weights; by default the headers of its files are read, which are fetched if need be. Raises
    ConfigError for a head that the target cannot have, TargetError for a target that is to make up the data and cannot,
    and EagleError for a target that cannot be found.
    """
    config = resolved(config)
    target = target or config.loading.load(config.head.target, lazy=True)
    kind = KINDS[config.head.kind]
    kind.check(target, config)
    if config.data.is_self and target.tokenizer is not None:
        if target.tokenizer.has_chat_template:
            steerable(target.tokenizer, MakeConfig().domains, target.name)
        else:
            beginning(target.tokenizer, target.name)
    return Bound(config, target, kind.blank(target, config))


def described_target(name: str, model: Mapping[str, Any]) -> Target:
    """Return a target without weights, from the fields of its config.json. Nothing of it may be computed.

    `quantization` is applied to every matrix; `experts` in it has other settings for those of a mixture of experts.
    Raises TargetError if mlx-lm knows no such model.
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
            chosen = experts if type(part).__name__ in ("SwitchLinear", "QuantizedSwitchLinear") else how
            return hasattr(part, "to_quantized") and part.weight.shape[-1] % chosen["group_size"] == 0 and chosen

        nn.quantize(made, class_predicate=choose)
    return Target(made, name=name)


def parameters_of(model: nn.Module) -> int:
    """Return how many parameters a model has; quantized ones count as what they stand for."""
    return sum(_own_parameters(part) for _, part in model.named_modules())


def _own_parameters(part: nn.Module) -> int:
    own = {name: leaf for name, leaf in part.items() if isinstance(leaf, mx.array) and not name.startswith("_")}
    if "scales" in own:
        packed = own.pop("weight")
        own = {name: leaf for name, leaf in own.items() if name not in ("scales", "biases")}
        return int(packed.size * 32 // part.bits) + sum(leaf.size for leaf in own.values())
    return sum(leaf.size for leaf in own.values())


def leaves(tree: Any) -> list[mx.array]:
    """Return the arrays of a tree of parameters."""
    return [leaf for _, leaf in cast("list[tuple[str, mx.array]]", tree_flatten(tree))]
