"""EAGLE-3: reads hidden states of several layers; has its own draft vocabulary and output projection."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.heads.eagle3 import Eagle3Head
from eagle_mlx.hidden_states import features_of
from eagle_mlx.target import Target

from ...config import TrainConfig
from ..base import Jitter, Kind, shape_settings
from ..least_squares import Matrix, Moments
from .start import (
    attend_to_itself,
    aux_layers_for,
    check_reads_front,
    check_shape,
    copy_last_layers,
    head_config,
    last_layers,
    layer_in_front,
    new_head,
)
from .unroll import unroll


class Eagle3Kind(Kind[Eagle3Head]):
    head_class = Eagle3Head
    unroll = staticmethod(unroll)
    defaults: ClassVar[Mapping[str, Any]] = {
        "draft_vocab": 32000,
        "unroll": 7,
        "decay": 0.8,
        "loss": "soft",
        "feature_noise": 0.0,
        "feature_norm": "each",
        "recycle": "normed",
    }
    foreign: ClassVar[Mapping[str, str]] = {"loss_weights": "its loss is only the cross-entropy"}

    def blank(self, target: Target, config: TrainConfig) -> Eagle3Head:
        """Return a blank head. A head to continue from is not loaded yet, so its vocabulary gets the default size."""
        wanted = config.head.draft_vocab or (self.defaults["draft_vocab"] if config.head.init_from else 0)
        size = wanted if 0 < wanted < target.vocab_size else target.vocab_size
        d2t = mx.zeros(size, mx.int32) if size < target.vocab_size else None
        return Eagle3Head(head_config(target, config, size), d2t)

    def check(self, target: Target, config: TrainConfig) -> None:
        check_shape(target, config)
        if config.head.layers > 1:
            last_layers(Eagle3Head(head_config(target, config, target.vocab_size)), target)

    def aux_layers(self, target: Target, config: TrainConfig) -> tuple[int, ...]:
        return config.head.aux_layers or aux_layers_for(target.num_layers, config.head.layers)

    def aux_layers_of(self, head: Eagle3Head) -> tuple[int, ...]:
        return head.config.aux_layers

    def new(
        self, target: Target, config: TrainConfig, kept: NDArray[np.int64] | None, aux_layers: tuple[int, ...]
    ) -> Eagle3Head:
        size = target.vocab_size if kept is None else len(kept)
        shape = dataclasses.replace(head_config(target, config, size), aux_layers=aux_layers)
        head = new_head(target, shape, kept, config.run.seed)
        if shape.num_hidden_layers > 1:
            check_reads_front(target.num_layers, shape.num_hidden_layers, aux_layers)
            copy_last_layers(head, target)
        return head

    def guess(
        self, head: Eagle3Head, target: Target, following: mx.array, aux: list[mx.array], last: mx.array
    ) -> tuple[mx.array, mx.array]:
        inputs = [head.read(aux)[:, :-1], head.midlayer.input_layernorm(following)]
        if head.config.num_hidden_layers > 1:  # the copies of the target's layers continue from here
            front = layer_in_front(target.num_layers, head.config.num_hidden_layers)
            wanted = aux[head.config.aux_layers.index(front)]
        else:
            wanted = mx.fast.rms_norm(last, None, head.config.rms_norm_eps)
        return mx.concatenate(inputs, axis=-1), wanted[:, 1:]

    def begin_as(self, head: Eagle3Head, guess: Matrix, by: Moments) -> None:
        """Initialize the map. `fc` reads only the states, so the embedding's part goes through self-attention."""
        read = head.fc.weight.shape[1]
        of_states, of_embedding = guess[:read], guess[read:].T
        head.fc.weight = mx.array(of_states.T)
        if head.midlayer.norm_before_residual:  # the norm scales the residual to a mean square of 1
            of_embedding = of_embedding / by.root_mean_square(of_states)
        attend_to_itself(head.midlayer.self_attn, of_embedding)

    def mismatches(self, head: Eagle3Head, config: TrainConfig) -> Mapping[str, Any]:
        shape = head.config
        return {
            **shape_settings(shape, config),
            "feature_norm": "each" if shape.fc_norm else "all" if shape.norm_before_fc else "none",
            "recycle": "normed" if shape.norm_output else "output",
            "norm_before_residual": shape.norm_before_residual,
        }

    def like(self, head: Eagle3Head, config: Any) -> Eagle3Head:
        return Eagle3Head(config, head.d2t)

    def features(self, head: Eagle3Head, target: Target, states: mx.array, jitter: Jitter) -> mx.array:
        count = len(head.config.aux_layers)
        if not count:
            return super().features(head, target, states, jitter)
        read = jitter(features_of(states, target.hidden_size).astype(mx.float32))
        return head.features(list(mx.split(read, count, axis=-1)) if head.config.fc_norm else [read])
