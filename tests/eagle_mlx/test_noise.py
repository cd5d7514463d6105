"""Noise depends only on key, position and token, and passes as independent draws; broken noise does not."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx.decoding import noise
from eagle_mlx.decoding.noise import gumbel_at, gumbel_noise, noise_words, noisy_argmax
from eagle_mlx.decoding.sampling import SamplingBatch, Stream, gumbel
from eagle_mlx.sampling_params import SamplingParams
from tests.full import some
from tests.shortcuts import without_shortcuts

Array = np.ndarray[Any, Any]
Noise = Callable[[mx.array, mx.array, mx.array], mx.array]

LARGE = 151_936
"""Qwen3's vocabulary size."""


def keys_of(*seeds: int) -> mx.array:
    batch = SamplingBatch.of([SamplingParams(temperature=1.0)] * len(seeds), seeds)
    return batch.keys[:, Stream.TOKEN]


@settings(max_examples=some(60), deadline=None)
@given(
    seeds=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4),
    start=st.integers(0, 2**31 - 8),
    width=st.integers(1, 5),
    tokens=st.lists(st.integers(0, LARGE - 1), min_size=1, max_size=30),
)
def test_noise_is_the_same_for_any_selection(seeds: list[int], start: int, width: int, tokens: list[int]) -> None:
    """In a batch or alone, for one position or several, over the vocabulary, parts of it or chosen tokens."""
    positions = start + mx.arange(width)[None] + mx.arange(len(seeds))[:, None]
    together = gumbel_noise(keys_of(*seeds), positions, mx.array(tokens))
    assert together.shape == (len(seeds), width, len(tokens))
    for row, seed in enumerate(seeds):
        for column in range(width):
            at = positions[row : row + 1, column : column + 1]
            alone = gumbel_noise(keys_of(seed), at, mx.array(tokens[::-1]))
            assert mx.array_equal(alone[0, 0, ::-1], together[row, column])
    everywhere = gumbel(SamplingBatch.of([SamplingParams(1.0)], seeds[:1]), positions[:1], LARGE)
    assert mx.array_equal(everywhere[:, :, mx.array(tokens)], together[:1])
    few = gumbel(SamplingBatch.of([SamplingParams(1.0)], seeds[:1]), positions[:1], 37)
    assert mx.array_equal(everywhere[..., :37], few)


def test_noise_is_the_same_in_one_kernel() -> None:
    arguments = keys_of(1, 2), mx.arange(6).reshape(2, 3), mx.arange(1000)
    plain = gumbel_noise(*arguments)
    with without_shortcuts():
        np.testing.assert_allclose(gumbel_noise(*arguments), plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_drafts_vocabulary_and_a_trees_nodes(dtype: mx.Dtype) -> None:
    """Ids of the places key the noise; several positions may share it; a greedy row has none."""
    rng = np.random.default_rng(1)
    ids = mx.array(np.sort(rng.choice(LARGE, 1000, replace=False)))
    levels, temperature = mx.array(rng.integers(0, 3, (2, 9))), mx.array([0.7, 0.0])
    logits = mx.array(rng.normal(scale=3, size=(2, 9, 1000)).astype(np.float32)).astype(dtype)
    words = noise_words(keys_of(5, 6), mx.broadcast_to(mx.arange(3), (2, 3)))
    own = (mx.take_along_axis(word, levels[..., None], axis=1) for word in words)
    scores = logits.astype(mx.float32) + temperature[:, None, None] * gumbel_at(*own, ids)
    assert mx.array_equal(noisy_argmax(logits, temperature, words, ids, levels), mx.argmax(scores, axis=-1))


def chi_square_z(counts: Array) -> float:
    """Return how far counts are from equal, as an approximate z-score (Wilson and Hilferty 1931)."""
    expected, freedom = counts.mean(), counts.size - 1
    ratio = ((counts - expected) ** 2).sum() / expected / freedom
    return float((ratio ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom)))


def pairs_z(first: Array, second: Array, cells: int = 16) -> float:
    """Return how far two uniform variates are from independent and uniform, in cells x cells."""
    places = np.minimum((first * cells).astype(int), cells - 1) * cells + np.minimum(
        (second * cells).astype(int), cells - 1
    )
    return chi_square_z(np.bincount(places.ravel(), minlength=cells**2))


def worst_z(draw: Noise) -> float:
    """Return the worst of several z-scores of noise.

    They cover 130 positions of 2 rows and 4,096 tokens: single draws, and pairs of tokens, positions and rows.
    """
    positions = mx.broadcast_to(mx.arange(130), (2, 130))
    drawn = np.array(draw(keys_of(7, 8), positions, mx.arange(4096)), np.float64)
    u = np.exp(-np.exp(-drawn))
    scores = [chi_square_z(np.bincount(np.minimum((u * 1000).astype(int), 999).ravel(), minlength=1000))]
    for step in (1, 2, 3, 4, 16, 64, 256, 1024, 2048):
        scores.append(pairs_z(u[..., step:], u[..., :-step]))
    tokens = np.arange(4096)
    for bit in range(12):
        without = tokens[tokens >> bit & 1 == 0]
        scores.append(pairs_z(u[..., without], u[..., without | 1 << bit]))
    scores.append(pairs_z(u[0], u[1]))
    for step in (1, 2, 4, 16, 128):
        scores.append(pairs_z(u[:, step:], u[:, :-step]))
    # The same tokens at two positions, and other tokens.
    scores += [pairs_z(u[:, 1:, :-step], u[:, :-1, step:]) for step in (1, 2, 256)]
    return float(np.abs(scores).max())


def test_noise_passes_for_independent_draws() -> None:
    assert worst_z(gumbel_noise) < 4.5


def one_position(keys: mx.array, positions: mx.array, tokens: mx.array) -> mx.array:
    return gumbel_noise(keys, mx.zeros_like(positions), tokens)


def one_row(keys: mx.array, positions: mx.array, tokens: mx.array) -> mx.array:
    return gumbel_noise(mx.zeros_like(keys), positions, tokens)


def shifted(keys: mx.array, positions: mx.array, tokens: mx.array) -> mx.array:
    """Use one sequence for all positions; each begins one token later."""
    whole = gumbel_noise(keys, mx.zeros_like(positions[:, :1]), mx.arange(5000))[:, 0]
    at = positions[..., None] + tokens
    return mx.take_along_axis(whole[:, None], at.reshape(len(keys), 1, -1), axis=-1).reshape(at.shape)


def wider(keys: mx.array, positions: mx.array, tokens: mx.array) -> mx.array:
    """Right except for the scale, which is 2% too large."""
    return 1.02 * gumbel_noise(keys, positions, tokens)


@pytest.mark.parametrize("broken", [one_position, one_row, shifted, wider])
def test_broken_noise_is_detected(broken: Noise) -> None:
    assert worst_z(broken) > 10


def test_half_a_hash_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "mixed_bits", lambda before, between, tokens: (tokens ^ before) * noise.FIRST + between)
    assert worst_z(gumbel_noise) > 10


def test_the_upper_tail_is_that_of_gumbel_noise() -> None:
    """If unlikely tokens win: also beyond 2^-24, in 38 million draws."""
    limits = np.array([4.0, 6.0, 8.0, 10.0, 12.0, 14.0])
    counts, draws = np.zeros(len(limits)), 0
    for start in range(0, 250, 25):
        drawn = gumbel_noise(keys_of(start), start + mx.arange(25)[None], mx.arange(LARGE))
        counts += [mx.sum(drawn > limit).item() for limit in limits]
        draws += drawn.size
    expected = -np.expm1(-np.exp(-limits)) * draws
    assert expected[-1] > 20
    assert np.abs((counts - expected) / np.sqrt(expected)).max() < 4.5


def test_positions_have_independent_maxima() -> None:
    """Winning tokens make the text: test their indices alone, and in pairs of positions."""
    winners = np.concatenate(
        [
            np.array(mx.argmax(gumbel_noise(keys_of(seed), mx.arange(500)[None], mx.arange(4096)), axis=-1))
            for seed in range(40)
        ]
    )
    u = (winners + 0.5) / 4096
    assert abs(chi_square_z(np.bincount((u * 64).astype(int).ravel(), minlength=64))) < 4.5
    assert abs(pairs_z(u[:, 1:], u[:, :-1], cells=8)) < 4.5
    low_bits = (winners % 64 + 0.5) / 64
    assert abs(chi_square_z(np.bincount((low_bits * 64).astype(int).ravel(), minlength=64))) < 4.5
    assert abs(pairs_z(low_bits[:, 1:], low_bits[:, :-1], cells=8)) < 4.5
    assert abs(pairs_z(u, low_bits, cells=8)) < 4.5
