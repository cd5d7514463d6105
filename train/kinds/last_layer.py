"""EAGLE-1 and MTP: kinds with one layer, which read the target's last hidden state and draft its whole vocabulary."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx

from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.eagle import EagleConfig, EagleHead
from eagle_mlx.heads.mtp import MTPConfig, MTPHead
from eagle_mlx.target import Target

from ..config import TrainSettings
from .base import Kind, layer_shape
from .least_squares import Matrix, Moments, Piece


class EagleKind(Kind[EagleHead]):
    """Source: Li et al. 2024, EAGLE, section 4.2 (regression and 0.1 of classification, noise on the features)."""

    head_class = EagleHead

    def head_config(self, target: Target, config: TrainSettings, *_: Any) -> EagleConfig:
        return EagleConfig(**layer_shape(target, config))

    def guess(self, head: EagleHead, following: mx.array, aux: list[mx.array], last: mx.array) -> Piece:
        states = head.target.norm(last.astype(head.target.dtype)).astype(mx.float32)
        return mx.concatenate([following, states[:, :-1]], axis=-1), states[:, 1:]

    def begin_as(self, head: EagleHead, guess: Matrix, by: Moments) -> None:
        head.fc.weight = mx.array(guess.T)


class MTPKind(Kind[MTPHead]):
    """Source: DeepSeek-AI 2024, DeepSeek-V3, section 2.2, with one layer for all steps as in vllm-project/speculators.

    The layer has the target's own architecture. Loss weights decay by 0.6 per step: for three steps 0.51, 0.31 and
    0.18, as in that project.
    """

    head_class = MTPHead

    def head_config(self, target: Target, config: TrainSettings, *_: Any) -> MTPConfig:
        model = target.model
        model_type = type(model).__module__.rsplit(".", 1)[-1]
        args = getattr(getattr(model, "language_model", None), "args", None) or getattr(model, "args", None)
        fields = dataclasses.asdict(args) if dataclasses.is_dataclass(args) and not isinstance(args, type) else {}
        try:
            return MTPConfig(model_type, {**fields, "vocab_size": target.vocab_size})
        except ConfigError as e:
            name = target.name or "this target"
            raise ConfigError(f"no MTP head is possible for {name}: {e}; try --head eagle3") from e

    def guess(self, head: MTPHead, following: mx.array, aux: list[mx.array], last: mx.array) -> Piece:
        states = head.features([last.astype(head.target.dtype)]).astype(mx.float32)
        wanted = mx.fast.rms_norm(last, None, float(head.config.layer["rms_norm_eps"]))
        return head.normed(following, states[:, :-1]), wanted[:, 1:]

    def begin_as(self, head: MTPHead, guess: Matrix, by: Moments) -> None:
        head.eh_proj.weight = mx.array(guess.T)
