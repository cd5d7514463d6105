"""Initialization of block heads as a linear guess: every slot reads the newest context position.

Attention scores depend on the distance alone: keys are one constant vector for context features and its negative for
the block's own slots, queries are that vector for every token, and RoPE lowers the score with the distance. The norms
of queries and keys make them exactly constant. The value path then applies the linear map, as far as its rank allows.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from eagle_mlx.heads.block import BlockHead

from ..base import SPREAD, final_norm, projection
from ..eagle3.start import attend_to_itself
from ..least_squares import Matrix, Moments, factors

LAGS = 3
"""Slots whose states the map predicts: later ones depend little on the context's newest position."""
_SHARPNESS = 8.0
"""Weight of the query norm. Scores of 64 dimensions then differ by 2 to 5 between the two newest positions."""
_RIDGE = 1e-3
"""Ridge relative to the mean square of the inputs; only the signs of the solution's products matter."""


def lagged(states: mx.array, following: mx.array, wanted: mx.array) -> tuple[mx.array, mx.array]:
    """Return inputs and outputs of the linear map for slots 0 to `LAGS` - 1, one after the other.

    states [1, L - 1, D] at positions 0 to L - 2; following [1, L - 1, E], the embeddings of tokens 1 to L - 1; wanted
    [1, L - 1, H], the target's states there. Inputs are [1, N, D + E + 1]: states, embeddings with a mean square of 1,
    which the ridge would suppress if they were smaller than the states, and a constant.
    """
    following = unit(following)
    slots = range(min(LAGS, states.shape[1]))
    read = [states[:, : states.shape[1] - slot] for slot in slots]
    tokens = [following[:, slot:] for slot in slots]
    x = mx.concatenate([mx.concatenate(read, axis=1), mx.concatenate(tokens, axis=1)], axis=-1)
    ones = mx.ones((*x.shape[:2], 1))
    return mx.concatenate([x, ones], axis=-1), mx.concatenate([wanted[:, slot:] for slot in slots], axis=1)


def begin_linear(head: BlockHead, guess: Matrix, by: Moments) -> None:
    """Initialize a new head to compute the map [D + E + 1, H] of `lagged` inputs, as far as its ranks allow.

    The states' part goes through the first layer's attention, the token's part through the Markov head, if any.
    """
    target, size = head.target, head.config.hidden_size
    read = head.fc.weight.shape[1]
    of_states, of_token = guess[:read], guess[read:]
    scale = by.root_mean_square(of_states)
    head.fc.weight = mx.array(np.ascontiguousarray(of_states.T))
    head.norm.weight = final_norm(target) * scale
    attention: Any = head.layers[0].self_attn
    mask = np.array(unit(head.embed(mx.array([head.config.mask_token_id])).astype(mx.float32)))[0]
    count, sums = by.count, by.xx[-1]
    features, tokens = of_states.T @ by.xx[:read, :read] @ of_states, by.xx[read:-1, read:-1]
    sum_features, sum_tokens = of_states.T @ sums[:read], sums[read:-1]
    features, sum_features = features / scale**2, sum_features / scale
    each = count * np.outer(mask, mask)
    queries = _solved(tokens + each, sum_tokens + count * mask)
    keys = _solved(features + tokens + each, sum_features - sum_tokens - count * mask)
    for layer, weights in ((attention.q_proj, queries), (attention.k_proj, keys)):
        noise = layer.weight * (0.1 / SPREAD / size**0.5)
        layer.weight = noise + mx.array(np.tile(weights, (layer.weight.shape[0], 1)).astype(np.float32))
    attention.q_norm.weight = mx.full(attention.q_norm.weight.shape, _SHARPNESS)
    rank = attention.kv_heads * attention.q_norm.weight.shape[0]
    _, directions = np.linalg.eigh(features)
    kept = directions[:, -rank:]
    attend_to_itself(attention, (scale * kept @ kept.T).astype(np.float32))
    if head.config.markov_head is not None:
        left, right = factors(np.ascontiguousarray(of_token.T), head.config.markov_rank)
        vocabulary = unit(head.embed(mx.arange(target.vocab_size)).astype(mx.float32))
        vocabulary = mx.concatenate([vocabulary, mx.ones((target.vocab_size, 1))], axis=-1)
        head.markov_head.markov_w1.weight = vocabulary @ mx.array(right).T
        rows = projection(target) if head.token_ids is None else projection(target)[head.token_ids]
        head.markov_head.markov_w2.weight = (rows * final_norm(target)) @ mx.array(left)


def unit(embeddings: mx.array) -> mx.array:
    """Scale vectors [..., E] to a mean square of 1."""
    return mx.fast.rms_norm(embeddings, None, 1e-6)


def _solved(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return x with a x = b, by least squares with a ridge."""
    return np.linalg.solve(a + _RIDGE * np.trace(a) / len(a) * np.eye(len(a)), b)
