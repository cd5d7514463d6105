"""Targets with random weights in the shapes of real models. They cost as much as trained ones."""

from __future__ import annotations

from dataclasses import dataclass

import eagle_mlx  # noqa: F401  (first: it brings the fast BLAS before MLX)

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3


@dataclass(frozen=True)
class Shape:
    """The sizes of a model of Qwen3's architecture."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    """Whether the output projection is the embedding."""


# Sizes from the config.json of models on the hub.
QWEN3_8B = Shape(4096, 36, 12288, 32, 8, 128, 151_936, tied=False)
QWEN3_06B = Shape(1024, 28, 3072, 16, 8, 128, 151_936, tied=True)
MIDDLING = Shape(512, 8, 1536, 8, 4, 64, 8192, tied=True)
TINY = Shape(128, 4, 256, 4, 2, 32, 1024, tied=True)


def random_model(shape: Shape) -> nn.Module:
    """Return a model in float32. Nothing is computed yet."""
    return qwen3.Model(
        qwen3.ModelArgs(
            model_type="qwen3",
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            intermediate_size=shape.intermediate,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab,
            rms_norm_eps=1e-6,
            max_position_embeddings=40960,
            rope_theta=1e6,
            tie_word_embeddings=shape.tied,
        )
    )


def in_four_bits(model: nn.Module, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """Quantize the matrices to 4 bits in groups of 64, as mlx-lm does; cast the rest to a type."""
    model.set_dtype(dtype)
    nn.quantize(model, group_size=64, bits=4)
    mx.eval(model.parameters())
    return model
