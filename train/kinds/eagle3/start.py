"""Initialization of EAGLE-3 heads: shaped like the target, and random except for weights from the target.

A head predicts the target's state at the next token from the states at this token and the next token's embedding. With
several layers, its first layer predicts the input of the target's last layers, and copies of those do the rest.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.eagle3 import Eagle3Head, default_aux_layers
from eagle_mlx.heads.layers import Attention
from eagle_mlx.target import Target

from ..base import SPREAD, plain_weights
from ..least_squares import Matrix, factors


def tie_queries_to_keys(attention: Attention) -> None:
    """Initialize queries like the keys of their group, so that each position attends to itself and similar ones.

    An EAGLE-3 head reads the newest token only through attention. With unrelated queries and keys, all positions get
    equal weight, and the newest token's share falls with the context length (docs/decisions.md).
    """
    keys = attention.k_proj.weight
    dim, width = keys.shape[0] // attention.kv_heads, keys.shape[1]
    # A position's score with itself is 8: its weight is e**8, or 3,000 times that of an unrelated key.
    spread = (8.0 / (dim**0.5 * width)) ** 0.5  # inputs are normed: their squared norm is `width`
    keys = keys * (spread / SPREAD)
    attention.k_proj.weight = keys
    shared = keys.reshape(attention.kv_heads, 1, dim, width)
    each = mx.broadcast_to(shared, (attention.kv_heads, attention.heads // attention.kv_heads, dim, width))
    attention.q_proj.weight = each.reshape(attention.heads * dim, width)


def attend_to_itself(attention: Attention, matrix: Matrix) -> None:
    """Set value and output weights so that attention to itself applies matrix [H, E] to a position's embedding.

    The embedding is the first part of the attention's input. The matrix is approximated if the rank is too low. The
    query heads of a group share their values, so each contributes an equal part.
    """
    size = attention.o_proj.weight.shape[1] // attention.heads
    left, right = factors(matrix, attention.kv_heads * size)
    values = np.zeros(attention.v_proj.weight.shape, np.float32)
    values[:, : matrix.shape[1]] = right
    group = attention.heads // attention.kv_heads
    each = left.reshape(len(left), attention.kv_heads, 1, size) / group
    output = np.broadcast_to(each, (len(left), attention.kv_heads, group, size))
    attention.v_proj.weight = mx.array(values)
    attention.o_proj.weight = mx.array(np.ascontiguousarray(output).reshape(attention.o_proj.weight.shape))


def aux_layers_for(num_layers: int, layers: int) -> tuple[int, ...]:
    """Return the target layers that a head reads by default, including the one before the copied layers."""
    low, middle, high = default_aux_layers(num_layers)
    return tuple(sorted({low, middle, num_layers - layers if layers > 1 else high}))


def check_reads_front(num_layers: int, layers: int, aux_layers: tuple[int, ...]) -> None:
    """Raise ConfigError if copied layers would need an output that the head does not read."""
    if layers > num_layers:
        raise ConfigError(f"--layers {layers}: must be at most {num_layers}, the number of the target's layers")
    front = num_layers - layers  # the copied layers read its output
    if layers > 1 and front not in aux_layers:
        raise ConfigError(
            f"--layers {layers}: the copied layers continue from the output of the target's layer {front}, which "
            f"the head does not read; add it to --aux-layers, or replace one of {', '.join(map(str, aux_layers))}"
        )


def layer_flags(target: Target) -> dict[str, Any]:
    """Return the head config's flags for attention features of the target's last layer beyond Llama's."""
    attention: Any = getattr(target.layers[-1], "self_attn", None)
    biased = ["bias" in getattr(attention, name, {}) for name in ("q_proj", "o_proj")]
    return {"qk_norm": hasattr(attention, "q_norm"), "qkv_bias": biased == [True, False], "attention_bias": all(biased)}


def last_layers(head: Eagle3Head, target: Target) -> list[dict[str, mx.array]]:
    """Return the weights of the target's last layers by the head's names, dequantized, in float32 and unevaluated.

    Raises ConfigError if they differ from the weights of Llama's and Qwen3's layers.
    """
    count, copies = head.config.num_hidden_layers, []
    for number, layer in enumerate(head.layers, target.num_layers - count + 1):
        source = target.layers[number]
        own = _in_halves(source, plain_weights(source))
        wanted = {name: value.shape for name, value in plain_weights(layer).items()}
        found = {name: value.shape for name, value in own.items()}
        if found != wanted:
            odd = sorted(name for name in {**found, **wanted} if found.get(name) != wanted.get(name))
            raise ConfigError(
                f"--layers {count}: layer {number} of {target.name or 'the target'} has weights that a head "
                f"cannot have: {', '.join(odd[:4])}; use --layers 1"
            )
        copies.append(own)
    return copies


def _in_halves(layer: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return a layer's weights with the channels of queries and keys reordered for RoPE that rotates halves of a head.

    Targets with `rope_traditional` rotate neighboring channels instead.
    """
    attention: Any = getattr(layer, "self_attn", None)
    if not getattr(getattr(attention, "rope", None), "traditional", False):
        return weights
    turned = ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.q_norm.", "self_attn.k_norm.")
    width = attention.rope.dims

    def even_first(x: mx.array) -> mx.array:  # x [n * width, ...]
        return x.reshape(-1, width // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

    return {name: even_first(x) if name.startswith(turned) else x for name, x in weights.items()}
