"""What differs between kinds of heads, as far as training is concerned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.heads.eagle import EagleHead
from eagle_mlx.heads.eagle3 import Eagle3Head
from eagle_mlx.heads.mtp import MTPHead
from eagle_mlx.hidden_states import last_of
from eagle_mlx.target import Target

from ..config import TrainConfig
from ..unroll import unroll_feedback
from .least_squares import Matrix, Moments

Head = Eagle3Head | EagleHead | MTPHead
H = TypeVar("H", Eagle3Head, EagleHead, MTPHead)
Jitter = Callable[[mx.array], mx.array]
"""Adds noise to float32 hidden states [B, L, n], and gives them the type in which the head computes."""


class Kind(ABC, Generic[H]):
    """A kind of head: how it begins, what it reads, how its draft steps run, how it is written.

    Unless it says otherwise it reads the last layer alone, and drafts the target's whole vocabulary.
    """

    name: ClassVar[str]
    """As `--head` has it."""
    title: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]]
    """What settings that are left open mean for this kind."""
    foreign: ClassVar[Mapping[str, str]]
    """Settings that it has no use for, and why."""
    head_class: type[H]

    @abstractmethod
    def blank(self, target: Target, config: TrainConfig) -> H:
        """Return a head of the shape that the settings ask for, without values.

        A draft vocabulary has the size that is asked for. Raises ConfigError if the target cannot have such a head.
        """

    def check(self, target: Target, config: TrainConfig) -> None:
        """Raise ConfigError, before anything is captured, if no such head can be made for the target."""
        self.blank(target, config)

    def aux_layers(self, target: Target, config: TrainConfig) -> tuple[int, ...]:
        """Target layers, besides the last one, whose outputs a new head reads."""
        return ()

    def aux_layers_of(self, head: H) -> tuple[int, ...]:
        """The same of a head that exists."""
        return ()

    @abstractmethod
    def new(
        self, target: Target, config: TrainConfig, kept: NDArray[np.int64] | None, aux_layers: tuple[int, ...]
    ) -> H:
        """A head before training; `kept` [Vd] are the target's ids of the draft vocabulary, None for all."""

    @abstractmethod
    def guess(
        self, head: H, target: Target, following: mx.array, aux: list[mx.array], last: mx.array
    ) -> tuple[mx.array, mx.array]:
        """What the first draft step makes of a new head's linear guess, and what that guess is to be.

        following [1, L - 1, E] float32: the embeddings of tokens 1 to L - 1. aux, last [1, L, H] float32: the outputs
        of the layers that the head reads and of the last one. Returns inputs [1, L - 1, D], those of positions 0 to
        L - 2, and the target's states [1, L - 1, H] at the tokens behind them; where the head norms what it makes, with
        a mean square of 1.
        """

    @abstractmethod
    def begin_as(self, head: H, guess: Matrix, by: Moments) -> None:
        """Let a new head make this guess: [D, H], of the inputs in their order; `by`: what it was found by."""

    def adopt(self, head: H) -> H:
        """A loaded head made ready for training: a quantised one becomes what its weights stand for."""
        if head.config.quantization is None:
            return head
        plain = self.like(head, replace(head.config, quantization=None))
        plain.load_weights(list(plain_weights(head).items()))
        return plain

    def like(self, head: H, config: Any) -> H:
        """A new head of this config, which drafts the same vocabulary."""
        return self.head_class(config)

    def mismatches(self, head: H, config: TrainConfig) -> Mapping[str, Any]:
        """What a loaded head has for settings that decide a new one's shape, by name."""
        return {}

    def features(self, head: H, target: Target, states: mx.array, jitter: Jitter) -> mx.array:
        """The captured states [B, L, (n + 1) * Ht] -> what the first draft step reads, [B, L, H], jittered."""
        last = last_of(states, target.hidden_size).astype(target.dtype)
        return jitter(head.features([last]).astype(mx.float32))

    def unroll(
        self,
        head: H,
        embeddings: mx.array,
        g: mx.array,
        segments: mx.array,
        positions: mx.array,
        steps: int,
        recompute: bool = False,
    ) -> list[mx.array]:
        """The outputs of all draft steps; see `unroll_feedback`."""
        return unroll_feedback(head, embeddings, g, segments, positions, steps, recompute)

    @abstractmethod
    def save(
        self, head: H, folder: Path, target_name: str, extra: Mapping[str, Any], dtype: mx.Dtype = mx.bfloat16
    ) -> None:
        """Write the head in the layout of its kind, its numbers in a type; what was there is replaced."""


def freeze_embedding(head: nn.Module) -> None:
    """Leave a head's own embedding, if it has one, out of what is trained."""
    if "embed_tokens" in head:
        head["embed_tokens"].freeze()


def plain_weights(module: nn.Module) -> dict[str, mx.array]:
    """A module's parameters by name as float32, those that are quantised as what they stand for."""
    plain: dict[str, mx.array] = {}
    for path, part in module.named_modules():
        own = {name: value for name, value in part.items() if isinstance(value, mx.array) and not name.startswith("_")}
        if "scales" in own:
            how = {"group_size": part.group_size, "bits": part.bits, "mode": getattr(part, "mode", "affine")}
            own["weight"] = mx.dequantize(own["weight"], own.pop("scales"), own.pop("biases", None), **how)
        for name, value in own.items():
            full = f"{path}.{name}" if path else name
            plain[full] = value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value
    return plain
