"""A head before training: shaped after its target, random but for what the target can give it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path
from numpy.typing import NDArray

from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.eagle3 import Eagle3Config, Eagle3Head
from eagle_mlx.heads.layers import Attention
from eagle_mlx.target import Target

from ..config import TrainConfig
from .last_layers import aux_layers_for, check_reads_front, layer_flags
from .least_squares import Matrix, factors

_SPREAD = 0.02
_OWN_SCORE = 8.0
"""What a position's query makes of its own key before training: its weight is then e**8, 3,000 times that of a key
that has nothing to do with it, and no context that is trained on is much longer."""


def layer_shape(target: Target, config: TrainConfig) -> dict[str, Any]:
    """The sizes of a decoder layer as the head configs name them: the target's where none are given."""
    args = getattr(target.model, "args", None)
    args = getattr(args, "text_config", None) or args

    def of_target(name: str, default: Any) -> Any:
        value = args.get(name) if isinstance(args, dict) else getattr(args, name, None)
        return default if value is None else value

    hidden = target.hidden_size
    target_heads = int(of_target("num_attention_heads", max(1, hidden // 64)))
    heads = config.head.heads or target_heads
    return {
        "hidden_size": hidden,
        "intermediate_size": config.head.intermediate_size or int(of_target("intermediate_size", 3 * hidden)),
        "num_attention_heads": heads,
        "num_key_value_heads": config.head.kv_heads or int(of_target("num_key_value_heads", heads)),
        "head_dim": int(of_target("head_dim", hidden // target_heads)),
        "vocab_size": target.vocab_size,
        "rms_norm_eps": float(of_target("rms_norm_eps", 1e-6)),
        "rope_theta": float(of_target("rope_theta", 10000.0)),
        "max_position_embeddings": min(target.context_length, 1 << 17),
    }


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


def randomize(module: nn.Module, seed: int) -> None:
    """Norms at one, biases and the layers' output matrices at zero, the other matrices at random.

    So a layer starts as one that adds nothing to its input.
    """
    rng = np.random.default_rng(seed)

    def start(path: str, weight: mx.array) -> mx.array:
        if weight.ndim == 1:
            return mx.ones_like(weight) if "norm" in path else mx.zeros_like(weight)
        if path.endswith(("o_proj.weight", "down_proj.weight")):
            return mx.zeros_like(weight)
        return mx.array(rng.normal(0.0, _SPREAD, weight.shape), mx.float32)

    module.update(tree_map_with_path(start, module.parameters()))


def tie_queries_to_keys(attention: Attention) -> None:
    """Let queries begin as the keys of their group, so that each position sees itself and what is like it.

    The newest token reaches an EAGLE-3 head by its attention alone. Queries and keys that have nothing to do with each
    other see all positions alike, and of the newest token only a share that falls with the context (docs/decisions.md).
    """
    keys = attention.k_proj.weight
    dim, width = keys.shape[0] // attention.kv_heads, keys.shape[1]
    spread = (_OWN_SCORE / (dim**0.5 * width)) ** 0.5  # inputs are normed: `width` is their square
    keys = keys * (spread / _SPREAD)
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


def final_norm(target: Target) -> mx.array:
    """The weight [H] of the target's final norm, float32, however it is kept."""
    return target.norm(mx.ones((1, target.hidden_size), target.dtype))[0].astype(mx.float32)


def _projection(target: Target) -> mx.array:
    """The target's output projection as a matrix [V, H] float32, whether it is tied, quantised or neither."""
    eye = mx.eye(target.hidden_size, dtype=target.dtype)
    bias = target.lm_head(mx.zeros_like(eye[:1]))
    return (target.lm_head(eye) - bias).T.astype(mx.float32)
