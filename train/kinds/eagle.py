"""EAGLE-1 and 2: the head predicts the target's last hidden state, and uses the target's output projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.heads.eagle import EagleConfig, EagleHead
from eagle_mlx.target import Target

from ..config import TrainConfig
from .base import Kind, layer_shape, randomize
from .least_squares import Matrix, Moments


class EagleKind(Kind[EagleHead]):
    """Recipe: Li et al. 2024, EAGLE, section 4.2 (regression and 0.1 of classification, noise on the features)."""

    head_class = EagleHead
    defaults: ClassVar[Mapping[str, Any]] = {
        "unroll": 1,
        "decay": 0.8,
        "loss": "soft",
        "loss_weights": (1.0, 0.1),
        "feature_noise": 0.1,
    }
    foreign: ClassVar[Mapping[str, str]] = {
        "draft_vocab": "it drafts the target's whole vocabulary",
        "aux_layers": "it reads the target's last layer alone",
        "layers": "it has one",
        "feature_norm": "it has no such norm",
        "recycle": "its layout says which",
        "norm_before_residual": "it has no such norm",
    }

    def blank(self, target: Target, config: TrainConfig) -> EagleHead:
        return EagleHead(EagleConfig(**layer_shape(target, config)))

    def new(
        self, target: Target, config: TrainConfig, kept: NDArray[np.int64] | None, aux_layers: tuple[int, ...]
    ) -> EagleHead:
        """Return a random head with a layer that adds nothing.

        Initializing it to copy the feature was worse: after 150,000 tokens of the included target, τ at depth 3 was
        1.45 instead of 1.50.
        """
        head = self.blank(target, config)
        randomize(head, config.run.seed)
        head.attach(target)
        mx.eval(head.parameters())
        return head

    def guess(
        self, head: EagleHead, target: Target, following: mx.array, aux: list[mx.array], last: mx.array
    ) -> tuple[mx.array, mx.array]:
        states = target.norm(last.astype(target.dtype)).astype(mx.float32)
        return mx.concatenate([following, states[:, :-1]], axis=-1), states[:, 1:]

    def begin_as(self, head: EagleHead, guess: Matrix, by: Moments) -> None:
        head.fc.weight = mx.array(guess.T)

    def mismatches(self, head: EagleHead, config: TrainConfig) -> Mapping[str, Any]:
        shape = head.config
        return {
            "intermediate_size": shape.intermediate_size,
            "heads": shape.num_attention_heads,
            "kv_heads": shape.num_key_value_heads,
        }
