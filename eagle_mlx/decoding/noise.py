"""Noise for any token at any position, and the greatest of logits with noise: the Gumbel-max trick.

The noise is a hash of a key, the position and the token's id (counter-based: Salmon et al. 2011, Random123). So whoever
needs the noise of few tokens computes no other, and gets the same numbers. Gumbel-max: Gumbel 1954, Maddison et al.
2014. A GPU computes the noise of all tokens in one kernel. A CPU would pay two logarithms a token, so it takes them for
few: those that come first by a ceiling of the noise, which needs none.
"""

from __future__ import annotations

import math

import mlx.core as mx

from eagle_mlx.cpu import use_shortcuts
from eagle_mlx.decoding.filters import best_columns, fused, has_columns

FIRST = mx.array(0x85EBCA6B, mx.uint32)
"""The first multiplier of MurmurHash3's 32-bit finalizer (Appleby 2011, `fmix32`)."""
_SECOND = mx.array(0xC2B2AE35, mx.uint32)
"""Its second one."""
_UPPER = mx.array(0xFFFFFF00, mx.uint32)
"""The bits of a hash of which `_gumbel_of` takes an exponential variate that is the smaller, the larger they are."""
_PER_ULP = -math.log(2) * 2.0**-23
"""What a step of a float's integer is of its natural logarithm: 2^23 of them double it. The sign is that of noise."""


def gumbel_noise(keys: mx.array, positions: mx.array, tokens: mx.array) -> mx.array:
    """Standard Gumbel noise, always finite.

    keys: [B, 2] uint32; positions: [B, n] int32; tokens: [m] int32, token ids. Returns [B, n, m] float32.
    """
    return gumbel_at(*noise_words(keys, positions), tokens)


def noise_words(keys: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
    """What the noise of a position is made of, beside the token: two words, each [B, n, 1] uint32.

    keys, positions: as of `gumbel_noise`.
    """
    words = mx.vmap(mx.vmap(lambda key: mx.random.split(key, 1)[0]))(_keyed(keys, positions))
    return words[..., :1], words[..., 1:]


@fused
def gumbel_at(before: mx.array, between: mx.array, tokens: mx.array) -> mx.array:
    """`gumbel_noise` by the words of its positions. tokens: [m] or [B, n, m]. Returns [B, n, m] float32."""
    return _gumbel_of(mixed_bits(before, between, tokens.astype(mx.uint32)))


def gumbel_ceiling(before: mx.array, between: mx.array, tokens: mx.array) -> mx.array:
    """A number for each token, without a logarithm: its noise is at most this less a constant, and close where large.

    The exponential variate E behind the noise is at least v = 1 - exp(-E), so the noise is at most -log v. A float's
    bits, as an integer, are its binary logarithm to within 0.0861 from below (Mitchell 1962), but for scale and offset.
    The offset is that constant. Arguments as of `gumbel_at`.
    """
    v = (mixed_bits(before, between, tokens.astype(mx.uint32)) ^ _UPPER).astype(mx.float32)
    return v.view(mx.int32).astype(mx.float32) * _PER_ULP


def uniform_noise(keys: mx.array, positions: mx.array) -> mx.array:
    """Uniform noise in [0, 1), a number for each position. keys, positions: as of `gumbel_noise`. Returns [B, n]."""
    draws: mx.array = mx.vmap(mx.vmap(lambda key: mx.random.uniform(key=key)))(_keyed(keys, positions))
    return draws


def _keyed(keys: mx.array, positions: mx.array) -> mx.array:
    """A key for each position, [B, n, 2] uint32, for MLX's own generator (Threefry), which makes strangers of them."""
    return keys[:, None] ^ (positions[..., None].astype(mx.uint32) * mx.array([0, 1], mx.uint32))


def mixed_bits(before: mx.array, between: mx.array, tokens: mx.array) -> mx.array:
    """32 bits for each token: MurmurHash3's finalizer, with a word of the key before each of its products.

    With a single word, the bits of one position would be those of another in a different order.
    """
    bits = ((tokens ^ (tokens >> 16)) ^ before) * FIRST + between
    bits = (bits ^ (bits >> 13)) * _SECOND
    return bits ^ (bits >> 16)


def _gumbel_of(bits: mx.array) -> mx.array:
    """Minus the logarithm of an exponential variate, whose own logarithm is taken of the upper 24 bits.

    The lower 8 bits fill the gaps of 2^-24 between its values. That resolves the variates near 0, with which unlikely
    tokens win. All products are exact, so that contracting them with sums cannot change the result.
    """
    upper = (bits | 255).astype(mx.float32) * 2.0**-32  # in (0, 1], on the grid of 2^-24 where it is close to 1
    lower = (bits & 255).astype(mx.float32) * 2.0**-32 + 2.0**-33  # in (0, 2^-24)
    return -mx.log(lower - mx.log(upper))


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
