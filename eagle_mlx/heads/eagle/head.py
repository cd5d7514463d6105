"""The head of EAGLE-1 and EAGLE-2, which predicts the target's own last hidden states.

Sources: Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" and "EAGLE-2: Faster
Inference of Language Models with Dynamic Draft Trees" (the same head); tensor names as in SafeAILab/EAGLE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.heads.base import HeadBase, Mask, caches_of
from eagle_mlx.heads.layers import LayerShape, PlainLayer


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LayerShape):
    """`hidden_size` is the target's."""

    bias: bool = True
    """A bias on `fc`."""


class EagleHead(HeadBase[EagleConfig]):
    """Features are the target's last hidden states after its final norm; the target's lm_head computes logits."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self._config = config
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = [PlainLayer(config, index, normed=index > 0) for index in range(config.num_hidden_layers)]

    @property
    def cache_layers(self) -> int:
        return self._config.num_hidden_layers

    def features(self, aux: Sequence[mx.array]) -> mx.array:
        """Target's last layer output [B, L, H] -> the same after the final norm."""
        return self.target.norm(aux[0])

    def __call__(self, embeddings: mx.array, g: mx.array, cache: Any | None = None, mask: Mask = None) -> mx.array:
        """Embeddings [B, L, H] of tokens t+1, features g [B, L, H] of positions t -> the features of t+1."""
        h: mx.array = self.fc(mx.concatenate([embeddings, g], axis=-1))
        for layer, kept in zip(self.layers, caches_of(cache, len(self.layers)), strict=True):
            h = layer(h, mask, kept)
        return h

    def logits(self, h: mx.array) -> mx.array:
        """h [..., H] -> logits [..., V]."""
        return self.target.lm_head(h)
