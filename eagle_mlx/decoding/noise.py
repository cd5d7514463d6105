"""Noise for any token at any position: a function of a key, the position and the token's id alone.

It is counter-based (Salmon et al. 2011, Random123): a draw is a hash of where it is asked for. So whoever needs the
noise of few tokens computes no other, and gets the same numbers.
"""

from __future__ import annotations

import math

import mlx.core as mx

from eagle_mlx.decoding.fused import fused

_FIRST = mx.array(0x85EBCA6B, mx.uint32)
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
    return _gumbel_of(_hash(before, between, tokens.astype(mx.uint32)))


def gumbel_ceiling(before: mx.array, between: mx.array, tokens: mx.array) -> mx.array:
    """A number for each token, without a logarithm: its noise is at most this less a constant, and close where large.

    The exponential variate E behind the noise is at least v = 1 - exp(-E), so the noise is at most -log v. A float's
    bits, as an integer, are its binary logarithm to within 0.0861 from below (Mitchell 1962), but for scale and offset.
    The offset is that constant. Arguments as of `gumbel_at`.
    """
    v = (_hash(before, between, tokens.astype(mx.uint32)) ^ _UPPER).astype(mx.float32)
    return v.view(mx.int32).astype(mx.float32) * _PER_ULP


def uniform_noise(keys: mx.array, positions: mx.array) -> mx.array:
    """Uniform noise in [0, 1), a number for each position. keys, positions: as of `gumbel_noise`. Returns [B, n]."""
    draws: mx.array = mx.vmap(mx.vmap(lambda key: mx.random.uniform(key=key)))(_keyed(keys, positions))
    return draws


def _keyed(keys: mx.array, positions: mx.array) -> mx.array:
    """A key for each position, [B, n, 2] uint32, for MLX's own generator (Threefry), which makes strangers of them."""
    return keys[:, None] ^ (positions[..., None].astype(mx.uint32) * mx.array([0, 1], mx.uint32))


def _hash(before: mx.array, between: mx.array, tokens: mx.array) -> mx.array:
    """32 bits for each token: MurmurHash3's finalizer, with a word of the key before each of its products.

    With a single word, the bits of one position would be those of another in a different order.
    """
    bits = ((tokens ^ (tokens >> 16)) ^ before) * _FIRST + between
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
