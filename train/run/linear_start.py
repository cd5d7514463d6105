"""Heads that begin as the best linear guess of the target's next hidden state.

EAGLE-1 and MTP heads have one projection of the embedding and the state side by side, which is the whole guess. An
EAGLE-3 head's projection `fc` sees the states alone. The next token's embedding goes through its attention, which sees
itself nearly alone (`tie_queries_to_keys`).
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from eagle_mlx.heads.eagle import EagleHead
from eagle_mlx.heads.eagle3 import Eagle3Head
from eagle_mlx.heads.mtp import MTPHead
from eagle_mlx.progress import progress_bar
from eagle_mlx.shards import Sample
from eagle_mlx.target import Target

from ..data import Samples, Tokens
from ..kinds import Head, kind_of
from .least_squares import Matrix, Moments, best_map, factors

_TOKENS_PER_INPUT = 32
"""Tokens that are read for each number that the guess is made of; by the figures in docs/log.md, where it is found."""
_SLOW = 2.0
"""Seconds after which a bar is shown."""

Pair = tuple[mx.array, mx.array]


def start_linear(head: Head, target: Target, samples: Samples, seed: int) -> None:
    """Give a new head the guess that fits samples best; without any it stays as it is.

    Samples without hidden states are read by the target.
    """
    head.attach(target)
    found = best_map(_pieces(head, target, samples, seed))
    if found is None:
        return
    guess, by = found
    match head:
        case Eagle3Head():
            _put_in_eagle3(head, guess, by)
        case EagleHead():
            head.fc.weight = mx.array(guess.T)
        case MTPHead():
            head.eh_proj.weight = mx.array(guess.T)
    mx.eval(head.parameters())


def _pieces(head: Head, target: Target, samples: Samples, seed: int) -> Iterator[Pair]:
    """Of one conversation after the other: what a draft step reads [n, D], and the target's next state [n, H].

    The first token is left out: models keep states there that are unlike all others (Sun et al. 2024, Massive
    Activations in Large Language Models).
    """
    most = _TOKENS_PER_INPUT * _inputs(head)
    with progress_bar(total=most, desc="linear start", unit="token", delay=_SLOW) as bar:
        for number in np.random.default_rng(seed).permutation(len(samples.lengths)):
            sample = samples[int(number)]
            tokens = mx.array(sample.tokens)[None]
            if tokens.size < 3:
                continue
            aux, last = _states(head, target, sample)
            x, y = _read(head, target, head.embed(tokens).astype(mx.float32), aux, last)
            if not bool(mx.all(mx.isfinite(x)) & mx.all(mx.isfinite(y))):
                continue  # which the first step that reads it will name
            yield x[0, 1:], y[0, 2:]
            bar.update(tokens.size)
            if bar.n >= most:
                return


def _states(head: Head, target: Target, sample: Sample | Tokens) -> tuple[list[mx.array], mx.array]:
    """The aux layers' outputs and the last one's for a conversation, each [1, L, H] float32."""
    layers = kind_of(head).aux_layers_of(head)
    if not isinstance(sample, Sample):
        hidden = target.forward(mx.array(sample.tokens)[None], aux_layers=(*layers, target.num_layers - 1)).aux
        *aux, last = (each.astype(mx.float32) for each in hidden)
        return aux, last
    aux = list(mx.split(mx.array(sample.aux)[None].astype(mx.float32), len(layers), axis=-1)) if layers else []
    return aux, mx.array(sample.last)[None].astype(mx.float32)


def _inputs(head: Head) -> int:
    """How many numbers the guess is made of."""
    match head:
        case Eagle3Head():
            return int(head.fc.weight.shape[1]) + head.config.hidden_size
        case EagleHead():
            return int(head.fc.weight.shape[1])
        case MTPHead():
            return int(head.eh_proj.weight.shape[1])


def _read(head: Head, target: Target, embedding: mx.array, aux: list[mx.array], last: mx.array) -> Pair:
    """What a draft step makes its guess of, [1, L - 1, D], and what it is to be at each token, [1, L, H].

    Where a norm follows, the guess is a state whose mean square is 1.
    """
    following = embedding[:, 1:]
    match head:
        case Eagle3Head():
            parts = [head.read(aux)[:, :-1], head.midlayer.input_layernorm(following)]
            return mx.concatenate(parts, axis=-1), mx.fast.rms_norm(last, None, head.config.rms_norm_eps)
        case EagleHead():
            state = target.norm(last.astype(target.dtype)).astype(mx.float32)
            return mx.concatenate([following, state[:, :-1]], axis=-1), state
        case MTPHead():
            state = head.features([last.astype(target.dtype)]).astype(mx.float32)
            return head.normed(following, state[:, :-1]), mx.fast.rms_norm(last, None, 1e-6)


def _put_in_eagle3(head: Eagle3Head, guess: Matrix, by: Moments) -> None:
    read = head.fc.weight.shape[1]
    head.fc.weight = mx.array(guess[:read].T)
    of_embedding = guess[read:].T
    if head.midlayer.norm_before_residual:  # the residual's mean square is 1, whatever `fc` makes
        of_embedding = of_embedding / _root_mean_square(guess[:read], by)
    _attend_to_itself(head, of_embedding)


def _root_mean_square(of_features: Matrix, by: Moments) -> float:
    """That of the numbers which `fc` makes of what it reads."""
    size = len(of_features)
    squares = float((of_features * (by.xx[:size, :size] @ of_features)).sum(dtype=np.float64))
    return float(np.sqrt(squares / (by.count * of_features.shape[1])))


def _attend_to_itself(head: Eagle3Head, matrix: Matrix) -> None:
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
