"""Decoder layers of a head that begin as the target's own last ones.

A head of several layers has to make, of the states at one token and the next token's embedding, what the target has
at the next token. Its first layer guesses the state in front of the target's last layers; copies of these do the rest.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.eagle3 import Eagle3Head, default_aux_layers
from eagle_mlx.target import Target

from .base import plain_weights


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
