"""The greatest of logits with noise: the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014) over large vocabularies.

A GPU computes the noise of all tokens in one kernel. A CPU has two logarithms a token to pay for that, so it takes them
for few: those that come first by a ceiling of the noise, which needs none.
"""

from __future__ import annotations

import mlx.core as mx

from eagle_mlx.cpu import use_shortcuts
from eagle_mlx.decoding.filters import best_columns, has_columns
from eagle_mlx.decoding.fused import fused
from eagle_mlx.decoding.noise import gumbel_at, gumbel_ceiling

CANDIDATES = 64
"""Columns of tokens whose noise is computed. The chance that the greatest is in another is below 2^-60 a position.

Let token j be the greatest, with a score of M, and a(i) = exp(logit(i) / T - M / T). All others' variates E(i) exceed
their a(i). That i passes j by its ceiling needs v(i) <= 1.062 a(i) as well, which is at most 1.062 a(i) likely. The
a(i) sum to no more than an Exp(1) variate. So 64 that pass are as likely as 64 events of a Poisson law whose mean is
1.062 times such a variate, or less: (1.062 / 2.062)^64 = 2^-61.
"""


def noisy_argmax(
    logits: mx.array,
    temperature: mx.array,
    words: tuple[mx.array, mx.array],
    token_ids: mx.array | None = None,
    levels: mx.array | None = None,
    any_greedy: bool = True,
) -> mx.array:
    """The place of the greatest of logits + temperature * noise, the first one where some are equal.

    logits: [B, n, V]; temperature: [B], 0 in greedy rows; words: of `noise_words`, for n positions; token_ids: [V], the
    id of each place, which keys its noise, None where they are the same; levels: [B, n] int32, which of the words'
    positions is whose, where there are fewer than n of them; any_greedy: whether a row may be greedy. Returns [B, n]
    int32.
    """
    warmth = temperature[:, None, None]
    tokens = mx.arange(logits.shape[-1]) if token_ids is None else token_ids
    if use_shortcuts() and has_columns(logits.shape[-1], CANDIDATES):
        ceilings = _spread(warmth * gumbel_ceiling(*words, tokens), levels)
        places = best_columns(logits + ceilings, CANDIDATES)
        before, between = (_spread(word, levels) for word in words)
        few = places if token_ids is None else token_ids[places]
        scores = _scores(mx.take_along_axis(logits, places, axis=-1), warmth, before, between, few)
        best = mx.take_along_axis(places, mx.argmax(scores, axis=-1, keepdims=True), axis=-1)[..., 0].astype(mx.int32)
        # Of very many logits that are equal the first may be in another column.
        return mx.where(temperature[:, None] == 0, _argmax(logits), best) if any_greedy else best
    if levels is not None:
        return _argmax(logits + warmth * _spread(gumbel_at(*words, tokens), levels))
    return _argmax(_scores(logits, warmth, *words, tokens))


@fused
def _scores(logits: mx.array, warmth: mx.array, before: mx.array, between: mx.array, tokens: mx.array) -> mx.array:
    return logits.astype(mx.float32) + warmth * gumbel_at(before, between, tokens)


def _spread(x: mx.array, levels: mx.array | None) -> mx.array:
    """x[b, levels[b, i]] for each row b and position i."""
    return x if levels is None else x[mx.arange(x.shape[0])[:, None], levels]


def _argmax(x: mx.array) -> mx.array:
    return mx.argmax(x, axis=-1).astype(mx.int32)
