"""Noise for any token at any position, and the argmax of logits with noise: the Gumbel-max trick.

The noise is a hash of a key, the position and the token's id (counter-based: Salmon et al. 2011, Random123), so it can
be computed for a few tokens alone. Gumbel-max: Gumbel 1954, Maddison et al. 2014.
"""

from __future__ import annotations

import mlx.core as mx

from eagle_mlx.decoding.filters import fused

FIRST, _SECOND = mx.array(0x85EBCA6B, mx.uint32), mx.array(0xC2B2AE35, mx.uint32)
"""The multipliers of MurmurHash3's 32-bit finalizer (Appleby 2011, `fmix32`)."""


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


def noisy_argmax(
    logits: mx.array,
    temperature: mx.array,
    words: tuple[mx.array, mx.array],
    token_ids: mx.array | None = None,
    levels: mx.array | None = None,
) -> mx.array:
    """Return the index of the largest of logits + temperature * noise, the first one in a tie.

    logits: [B, n, V]; temperature: [B], 0 in greedy rows; words: from `noise_words`, for n positions; token_ids: [V],
    the token id of each index, None if they are equal; levels: [B, n] int32, the index into the words' positions, if
    there are fewer than n. Returns [B, n] int32.
    """
    warmth = temperature[:, None, None]
    tokens = mx.arange(logits.shape[-1]) if token_ids is None else token_ids
    if levels is None:
        scores = _scores(logits, warmth, *words, tokens)
    else:
        noise = gumbel_at(*words, tokens)[mx.arange(logits.shape[0])[:, None], levels]
        scores = logits.astype(mx.float32) + warmth * noise
    return mx.argmax(scores, axis=-1).astype(mx.int32)


@fused
def _scores(logits: mx.array, warmth: mx.array, before: mx.array, between: mx.array, tokens: mx.array) -> mx.array:
    return logits.astype(mx.float32) + warmth * gumbel_at(before, between, tokens)
