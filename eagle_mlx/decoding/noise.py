"""Noise for any token at any position, and the argmax of logits with noise: the Gumbel-max trick.

The noise is a hash of a key, the position and the token's id (counter-based: Salmon et al. 2011, Random123), so it can
be computed for a few tokens alone. Gumbel-max: Gumbel 1954, Maddison et al. 2014. On a CPU two logarithms per token are
too slow, so we compute it only for the tokens that rank highest by an upper bound, which needs no logarithm.
"""

from __future__ import annotations

import math

import mlx.core as mx

from eagle_mlx.cpu import use_shortcuts
from eagle_mlx.decoding.filters import best_columns, fused, has_columns

FIRST, _SECOND = mx.array(0x85EBCA6B, mx.uint32), mx.array(0xC2B2AE35, mx.uint32)
"""The multipliers of MurmurHash3's 32-bit finalizer (Appleby 2011, `fmix32`)."""
_UPPER = mx.array(0xFFFFFF00, mx.uint32)
"""The upper bits of a hash. The larger they are, the smaller is the exponential variate in `gumbel_at`."""
_PER_ULP = -math.log(2) * 2.0**-23
"""Change of the natural logarithm per unit of a float's bits: 2^23 of them double it. The sign is that of the noise."""


def gumbel_noise(keys: mx.array, positions: mx.array, tokens: mx.array) -> mx.array:
    """Return finite Gumbel noise [B, n, m] float32 for keys [B, 2] uint32, positions [B, n] and tokens [m] int32."""
    return gumbel_at(*noise_words(keys, positions), tokens)


def noise_words(keys: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
    """Return two words of each position's noise, [B, n, 1] uint32 each. Arguments as in `gumbel_noise`."""
    words = mx.vmap(mx.vmap(lambda key: mx.random.split(key, 1)[0]))(_keyed(keys, positions))
    return words[..., :1], words[..., 1:]


@fused
def gumbel_at(before: mx.array, between: mx.array, tokens: mx.array) -> mx.array:
    """Return `gumbel_noise` from the words of its positions. tokens: [m] or [B, n, m]. Returns [B, n, m] float32.

    It is minus the logarithm of an exponential variate, which is minus the logarithm of the hash's upper 24 bits; the
    lower 8 resolve variates near 0. All products are exact, so that fusing them with sums cannot change the result.
    """
    bits = mixed_bits(before, between, tokens.astype(mx.uint32))
    upper = (bits | 255).astype(mx.float32) * 2.0**-32  # in (0, 1], in steps of 2^-24 near 1
    lower = (bits & 255).astype(mx.float32) * 2.0**-32 + 2.0**-33  # in (0, 2^-24)
    return -mx.log(lower - mx.log(upper))


def gumbel_ceiling(before: mx.array, between: mx.array, tokens: mx.array) -> mx.array:
    """Return an upper bound of each token's noise, up to a constant, without a logarithm; it is tight if large.

    The exponential variate E of the noise is at least v = 1 - exp(-E), so the noise is at most -log v. A float's bits,
    as an integer, are its binary logarithm up to scale and offset (the constant), and at most 0.0861 below it (Mitchell
    1962). Arguments as in `gumbel_at`.
    """
    v = (mixed_bits(before, between, tokens.astype(mx.uint32)) ^ _UPPER).astype(mx.float32)
    return v.view(mx.int32).astype(mx.float32) * _PER_ULP


def uniform_noise(keys: mx.array, positions: mx.array) -> mx.array:
    """Return uniform noise in [0, 1) for each position, [B, n]. Arguments as in `gumbel_noise`."""
    return mx.vmap(mx.vmap(lambda key: mx.random.uniform(key=key)))(_keyed(keys, positions))


def _keyed(keys: mx.array, positions: mx.array) -> mx.array:
    """Return a key for each position, [B, n, 2] uint32. MLX's generator (Threefry) makes them independent."""
    return keys[:, None] ^ (positions[..., None].astype(mx.uint32) * mx.array([0, 1], mx.uint32))


def mixed_bits(before: mx.array, between: mx.array, tokens: mx.array) -> mx.array:
    """Return 32 bits for each token: MurmurHash3's finalizer, with a word of the key before each product. With only one
    word, one position's bits would be a permutation of another's."""
    bits = ((tokens ^ (tokens >> 16)) ^ before) * FIRST + between
    bits = (bits ^ (bits >> 13)) * _SECOND
    return bits ^ (bits >> 16)


CANDIDATES = 64
"""Columns of tokens whose noise is computed. Each position misses the largest with a probability below 2^-60.

Let token j have the largest score M, and let a(i) = exp(logit(i) / T - M / T). All other variates E(i) exceed a(i). For
i to exceed j by its bound, v(i) <= 1.062 a(i) is needed, which has a probability of at most 1.062 a(i). The sum of all
a(i) is at most an Exp(1) variate. So the probability of 64 such tokens is at most that of 64 events of a Poisson
variate whose mean is 1.062 times an Exp(1) variate: (1.062 / 2.062)^64 = 2^-61.
"""


def noisy_argmax(
    logits: mx.array,
    temperature: mx.array,
    words: tuple[mx.array, mx.array],
    token_ids: mx.array | None = None,
    levels: mx.array | None = None,
    any_greedy: bool = True,
) -> mx.array:
    """Return the index of the largest of logits + temperature * noise, the first one in a tie.

    logits: [B, n, V]; temperature: [B], 0 in greedy rows; words: from `noise_words`, for n positions; token_ids: [V],
    the token id of each index, None if they are equal; levels: [B, n] int32, the index into the words' positions, if
    there are fewer than n; any_greedy: whether a row may be greedy. Returns [B, n] int32.
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
        # With very many equal logits, the first may be in another column.
        return mx.where(temperature[:, None] == 0, _argmax(logits), best) if any_greedy else best
    if levels is not None:
        return _argmax(logits + warmth * _spread(gumbel_at(*words, tokens), levels))
    return _argmax(_scores(logits, warmth, *words, tokens))


@fused
def _scores(logits: mx.array, warmth: mx.array, before: mx.array, between: mx.array, tokens: mx.array) -> mx.array:
    return logits.astype(mx.float32) + warmth * gumbel_at(before, between, tokens)


def _spread(x: mx.array, levels: mx.array | None) -> mx.array:
    return x if levels is None else x[mx.arange(x.shape[0])[:, None], levels]


def _argmax(x: mx.array) -> mx.array:
    return mx.argmax(x, axis=-1).astype(mx.int32)
