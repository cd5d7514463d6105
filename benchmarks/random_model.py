"""Targets with random weights in the shapes of real models. They cost as much as trained ones.

python benchmarks/random_model.py FOLDER    writes a tiny hybrid of Qwen3.5's architecture
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import eagle_mlx  # noqa: F401  (first: it brings the fast BLAS before MLX)

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3, qwen3_5

from eagle_mlx.catalog import embedded


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


def write_hybrid(folder: Path) -> None:
    """Write a tiny model of Qwen3.5's architecture, with the included target's tokenizer, as mlx-lm loads it.

    The output projection is larger than mlx-lm makes it, so that rounding decides no token.
    """
    shutil.copytree(embedded("target"), folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    text = {
        "model_type": "qwen3_5_text", "hidden_size": 192, "num_hidden_layers": 12, "intermediate_size": 512,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64, "full_attention_interval": 4,
        "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4, "vocab_size": 4096, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }  # fmt: skip
    config = {"model_type": "qwen3_5", "text_config": text, "vocab_size": 4096, "eos_token_id": [2, 0]}
    mx.random.seed(0)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    weights = dict(tree_flatten(model.parameters()))
    weights["language_model.lm_head.weight"] *= 4
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_hybrid(Path(sys.argv[1]))
