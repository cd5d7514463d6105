"""How an EAGLE-3 head begins: shaped after its target, random but for what the target can give it.

A head of several layers has to make, of the states at one token and the next token's embedding, what the target has
at the next token. Its first layer guesses the state in front of the target's last layers; copies of these do the rest.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.eagle3 import Eagle3Config, Eagle3Head, default_aux_layers
from eagle_mlx.heads.layers import Attention
from eagle_mlx.target import Target

from ...config import TrainConfig
from ..base import SPREAD, final_norm, layer_shape, plain_weights, randomize
from ..least_squares import Matrix, factors

_OWN_SCORE = 8.0
"""What a position's query makes of its own key before training: its weight is then e**8, 3,000 times that of a key
that has nothing to do with it, and no context that is trained on is much longer."""


def head_config(target: Target, config: TrainConfig, draft_vocab_size: int) -> Eagle3Config:
    """An EAGLE-3 head's architecture, after the target where nothing else is given."""
    return Eagle3Config(
        **layer_shape(target, config),
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layers=config.head.aux_layers or aux_layers_for(target.num_layers, config.head.layers),
        norm_before_fc=config.head.feature_norm == "all",
        fc_norm=config.head.feature_norm == "each",
        norm_output=config.head.feedback == "normed",
        norm_before_residual=config.head.norm_before_residual,
        num_hidden_layers=config.head.layers,
        **(layer_flags(target) if config.head.layers > 1 else {}),
    )


def check_shape(target: Target, config: TrainConfig) -> None:
    """Raise ConfigError, before anything is captured, where no EAGLE-3 head of this shape can be made."""
    shape = head_config(target, config, target.vocab_size)
    layers = shape.aux_layers
    check_reads_front(target.num_layers, shape.num_hidden_layers, layers)
    if not all(0 <= layer < target.num_layers for layer in layers):
        raise ConfigError(f"aux_layers {layers}: the target has layers 0 to {target.num_layers - 1}")
    if shape.norm_before_residual and shape.num_hidden_layers > 1:
        raise ConfigError(
            f"--norm-before-residual is not for --layers {shape.num_hidden_layers}: the copies of the target's layers "
            "read numbers of the target's own size; leave one of them out"
        )


def new_head(target: Target, config: Eagle3Config, kept: NDArray[np.int64] | None, seed: int) -> Eagle3Head:
    """An untrained head; `kept` [Vd] are the target's ids of the draft vocabulary, None for all.

    The final norm and the rows of the output projection are the target's; all else is as `randomize` and
    `tie_queries_to_keys` have it, so that the head starts as its feature's projection.
    """
    d2t = None if kept is None else mx.array(kept - np.arange(len(kept)), mx.int32)
    head = Eagle3Head(config, d2t)
    randomize(head, seed)
    tie_queries_to_keys(head.midlayer.self_attn)
    head.norm.weight = final_norm(target)
    rows = _projection(target)
    head.lm_head.weight = rows if kept is None else rows[mx.array(kept)]
    mx.eval(head.parameters())
    return head


def tie_queries_to_keys(attention: Attention) -> None:
    """Let queries begin as the keys of their group, so that each position sees itself and what is like it.

    The newest token reaches an EAGLE-3 head by its attention alone. Queries and keys that have nothing to do with each
    other see all positions alike, and of the newest token only a share that falls with the context (docs/decisions.md).
    """
    keys = attention.k_proj.weight
    dim, width = keys.shape[0] // attention.kv_heads, keys.shape[1]
    spread = (_OWN_SCORE / (dim**0.5 * width)) ** 0.5  # inputs are normed: `width` is their square
    keys = keys * (spread / SPREAD)
    attention.k_proj.weight = keys
    shared = keys.reshape(attention.kv_heads, 1, dim, width)
    each = mx.broadcast_to(shared, (attention.kv_heads, attention.heads // attention.kv_heads, dim, width))
    attention.q_proj.weight = each.reshape(attention.heads * dim, width)


def attend_to_itself(attention: Attention, matrix: Matrix) -> None:
    """Let values and output make matrix [H, E] of a position's own embedding, as nearly as their rank allows.

    That is the first part of what the attention reads. The query heads of a group share their values, and each brings
    its part.
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


def _projection(target: Target) -> mx.array:
    """The target's output projection as a matrix [V, H] float32, whether it is tied, quantised or neither."""
    eye = mx.eye(target.hidden_size, dtype=target.dtype)
    bias = target.lm_head(mx.zeros_like(eye[:1]))
    return (target.lm_head(eye) - bias).T.astype(mx.float32)


def layer_in_front(num_layers: int, layers: int) -> int:
    """The target's layer, counted from 0, whose output the copies read in a head of so many layers."""
    return num_layers - layers


def aux_layers_for(num_layers: int, layers: int) -> tuple[int, ...]:
    """The target's layers that a head of so many layers reads by default: the one in front of the copies among them."""
    low, middle, high = default_aux_layers(num_layers)
    return tuple(sorted({low, middle, layer_in_front(num_layers, layers) if layers > 1 else high}))


def check_reads_front(num_layers: int, layers: int, aux_layers: tuple[int, ...]) -> None:
    """Raise ConfigError where copies would go on from an output that the head does not read."""
    if layers > num_layers:
        raise ConfigError(f"--layers {layers}: the target has {num_layers}, and a copy of each but the first is made")
    front = layer_in_front(num_layers, layers)
    if layers > 1 and front not in aux_layers:
        raise ConfigError(
            f"--layers {layers}: the copies of the target's last layers go on from the output of its layer {front}, "
            f"which the head does not read; name it in --aux-layers, beside or in place of one of "
            f"{', '.join(map(str, aux_layers))}"
        )


def layer_flags(target: Target) -> dict[str, Any]:
    """What the attention of the target's last layer has besides Llama's, as head configs name it."""
    attention: Any = getattr(target.layers[-1], "self_attn", None)
    biased = ["bias" in getattr(attention, name, {}) for name in ("q_proj", "o_proj")]
    return {"qk_norm": hasattr(attention, "q_norm"), "qkv_bias": biased == [True, False], "attention_bias": all(biased)}


def copy_last_layers(head: Eagle3Head, target: Target) -> None:
    """Let the layers behind the first begin as the target's last ones. Raises ConfigError as `last_layers` does."""
    for layer, weights in zip(head.layers, last_layers(head, target), strict=True):
        layer.load_weights(list(weights.items()))


def last_layers(head: Eagle3Head, target: Target) -> list[dict[str, mx.array]]:
    """The weights of the target's last layers by name, as the head's have them: dequantised, in float32.

    Nothing is computed until they are used. Raises ConfigError where they are others than Llama's and Qwen3's layers
    have.
    """
    count, copies = head.config.num_hidden_layers, []
    first = layer_in_front(target.num_layers, count) + 1
    for number, layer in enumerate(head.layers, first):
        source = target.layers[number]
        own = _in_halves(source, plain_weights(source))
        wanted = {name: value.shape for name, value in plain_weights(layer).items()}
        found = {name: value.shape for name, value in own.items()}
        if found != wanted:
            odd = sorted(name for name in {**found, **wanted} if found.get(name) != wanted.get(name))
            raise ConfigError(
                f"--layers {count}: layer {number} of {target.name or 'the target'} is not one that a head can have, "
                f"since these weights differ: {', '.join(odd[:4])}; leave --layers out"
            )
        copies.append(own)
    return copies


def _in_halves(layer: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The weights of queries and keys for rotary positions that turn the halves of a head.

    Where a target turns neighbours instead (`rope_traditional`), the channels of each head change places.
    """
    attention: Any = getattr(layer, "self_attn", None)
    if not getattr(getattr(attention, "rope", None), "traditional", False):
        return weights
    turned = ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.q_norm.", "self_attn.k_norm.")
    width = attention.rope.dims
    return {name: _even_first(x, width) if name.startswith(turned) else x for name, x in weights.items()}


def _even_first(x: mx.array, width: int) -> mx.array:
    """x [n * width, ...] with the even channels of each head of that width in front of its odd ones."""
    return x.reshape(-1, width // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
