"""An EAGLE-3 head that begins as the best linear guess of the target's next hidden state.

What a step reads of the target goes through `fc` to the residual, and the next token's embedding through the attention,
which sees itself nearly alone (`tie_queries_to_keys`). So both parts of the guess have a place in the head.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from eagle_mlx.heads.eagle3 import Eagle3Head
from eagle_mlx.progress import progress_bar
from eagle_mlx.shards import Sample
from eagle_mlx.target import Target

from ..data import Samples
from .least_squares import Moments, best_map, factors

_TOKENS_PER_INPUT = 32
"""Tokens that are read for each number that the guess is made of; by the figures in docs/log.md, where it is found."""
_SLOW = 2.0
"""Seconds after which a bar is shown."""

Piece = tuple[mx.array, mx.array]


def start_linear(head: Eagle3Head, target: Target, samples: Samples, seed: int) -> None:
    """Give a new head's `fc` and attention the guess that fits samples best; without any it stays as it is.

    Samples without hidden states are read by the target.
    """
    head.attach(target)
    found = best_map(_pieces(head, target, samples, seed))
    if found is None:
        return
    guess, by = found
    read = head.fc.weight.shape[1]
    head.fc.weight = mx.array(guess[:read].T)
    of_embedding = guess[read:].T
    if head.midlayer.norm_before_residual:  # the residual's mean square is 1, whatever `fc` makes
        of_embedding = of_embedding / _root_mean_square(guess[:read], by)
    _attend_to_itself(head, of_embedding)
    mx.eval(head.parameters())


def _pieces(head: Eagle3Head, target: Target, samples: Samples, seed: int) -> Iterator[Piece]:
    """Of conversation after conversation: what a draft step reads, and the target's next state with a mean square of 1.

    The first token is left out: models keep states there that are unlike all others (Sun et al. 2024, Massive
    Activations in Large Language Models).
    """
    most = _TOKENS_PER_INPUT * (head.fc.weight.shape[1] + target.hidden_size)
    with progress_bar(total=most, desc="linear start", unit="token", leave=False, delay=_SLOW) as bar:
        for number in np.random.default_rng(seed).permutation(len(samples.lengths)):
            sample = samples[int(number)]
            tokens = mx.array(sample.tokens)[None]
            if tokens.size < 3:
                continue
            if isinstance(sample, Sample):
                aux, last = mx.array(sample.aux)[None], mx.array(sample.last)[None]
            else:
                hidden = target.forward(tokens, aux_layers=(*head.aux_layers, target.num_layers - 1)).aux
                aux, last = mx.concatenate(list(hidden[:-1]), axis=-1), hidden[-1]
            layers = list(mx.split(aux.astype(mx.float32), len(head.aux_layers), axis=-1))
            embedding = head.midlayer.input_layernorm(head.embed(tokens).astype(mx.float32))
            x = mx.concatenate([head.read(layers)[0, 1:-1], embedding[0, 2:]], axis=-1)
            yield x, mx.fast.rms_norm(last.astype(mx.float32), None, head.config.rms_norm_eps)[0, 2:]
            bar.update(tokens.size)
            if bar.n >= most:
                return


def _root_mean_square(of_features: np.ndarray, by: Moments) -> float:
    """That of the numbers which `fc` makes of what it reads."""
    size = len(of_features)
    squares = float((of_features * (by.xx[:size, :size] @ of_features)).sum(dtype=np.float64))
    return float(np.sqrt(squares / (by.count * of_features.shape[1])))


def _attend_to_itself(head: Eagle3Head, matrix: np.ndarray) -> None:
    """Let values and output make matrix [H, E] of a position's own embedding, as nearly as their rank allows.

    The query heads of a group share their values, and each brings its part.
    """
    attention, config = head.midlayer.self_attn, head.config
    left, right = factors(matrix, config.num_key_value_heads * config.head_dim)
    values = np.zeros(attention.v_proj.weight.shape, np.float32)
    values[:, : matrix.shape[1]] = right
    group = config.num_attention_heads // config.num_key_value_heads
    each = left.reshape(len(left), config.num_key_value_heads, 1, config.head_dim) / group
    output = np.broadcast_to(each, (len(left), config.num_key_value_heads, group, config.head_dim))
    attention.v_proj.weight = mx.array(values)
    attention.o_proj.weight = mx.array(np.ascontiguousarray(output).reshape(attention.o_proj.weight.shape))
