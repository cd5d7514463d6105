"""EAGLE-3: reads hidden states of several layers; has its own draft vocabulary and output projection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.eagle3 import Eagle3Config, Eagle3Head
from eagle_mlx.target import Target

from ...config import TrainConfig
from ..base import Kind, layer_shape
from ..least_squares import Matrix, Moments
from .start import attend_to_itself, aux_layers_for, check_reads_front, last_layers, layer_flags, tie_queries_to_keys
from .unroll import unroll


class Eagle3Kind(Kind[Eagle3Head]):
    head_class = Eagle3Head
    unroll: ClassVar[Callable[..., list[mx.array]]] = staticmethod(unroll)
    defaults: ClassVar[Mapping[str, Any]] = {
        "draft_vocab": 32000,
        "unroll": 7,
        "decay": 0.8,
        "layers": 1,
        "loss": "soft",
        "feature_noise": 0.0,
        "feature_norm": "each",
        "recycle": "normed",
    }
    foreign: ClassVar[Mapping[str, str]] = {"loss_weights": "--loss is its only loss"}

    def head_config(
        self, target: Target, config: TrainConfig, draft_vocab_size: int, aux_layers: tuple[int, ...]
    ) -> Eagle3Config:
        layers = config.head.layers or self.defaults["layers"]
        return Eagle3Config(
            **layer_shape(target, config),
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=target.hidden_size,
            aux_layers=aux_layers,
            norm_before_fc=config.head.feature_norm == "all",
            fc_norm=config.head.feature_norm == "each",
            norm_output=config.head.feedback == "normed",
            norm_before_residual=config.head.norm_before_residual,
            num_hidden_layers=layers,
            **(layer_flags(target) if layers > 1 else {}),
        )

    def check(self, target: Target, config: TrainConfig) -> None:
        layers = config.head.layers
        check_reads_front(target.num_layers, layers, self.aux_layers(target, config))
        super().check(target, config)
        if config.head.norm_before_residual and layers > 1:
            raise ConfigError(
                f"--norm-before-residual cannot be used with --layers {layers}: the copied layers need inputs of the "
                "target's scale; leave one of them out"
            )
        if layers > 1:
            last_layers(self.blank(target, config), target)

    def aux_layers(self, target: Target, config: TrainConfig) -> tuple[int, ...]:
        return config.head.aux_layers or aux_layers_for(target.num_layers, config.head.layers)

    def untrained(self, target: Target, shape: Eagle3Config, kept: NDArray[np.int64] | None, seed: int) -> Eagle3Head:
        """Return a head that starts as a projection of its feature, before copies of the target's last layers."""
        head = super().untrained(target, shape, kept, seed)
        tie_queries_to_keys(head.midlayer.self_attn)
        if shape.num_hidden_layers > 1:
            check_reads_front(target.num_layers, shape.num_hidden_layers, shape.aux_layers)
            for layer, weights in zip(head.layers, last_layers(head, target), strict=True):
                layer.load_weights(list(weights.items()))
        mx.eval(head.parameters())
        return head

    def guess(
        self, head: Eagle3Head, target: Target, following: mx.array, aux: list[mx.array], last: mx.array
    ) -> tuple[mx.array, mx.array]:
        inputs = [head.read(aux)[:, :-1], head.midlayer.input_layernorm(following)]
        if head.config.num_hidden_layers > 1:  # the copies of the target's layers continue from here
            front = target.num_layers - head.config.num_hidden_layers
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
            **super().mismatches(head, config),
            "feature_norm": "each" if shape.fc_norm else "all" if shape.norm_before_fc else "none",
            "recycle": "normed" if shape.norm_output else "output",
            "norm_before_residual": shape.norm_before_residual,
        }
