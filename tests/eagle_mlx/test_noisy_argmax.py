"""The argmax of logits with noise is the same with the noise of all tokens and of a few."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx.cpu import without_shortcuts
from eagle_mlx.decoding import noise as module
from eagle_mlx.decoding.filters import best_columns, has_columns
from eagle_mlx.decoding.noise import CANDIDATES, gumbel_at, gumbel_ceiling, noise_words, noisy_argmax
from eagle_mlx.decoding.sampling import SamplingBatch, Stream
from eagle_mlx.sampling_params import SamplingParams
from tests.full import some

pytestmark = pytest.mark.usefixtures("with_shortcuts")

SIZE = 16_384
LARGE = 151_936
"""Qwen3's vocabulary size."""


def words_of(rows: int, width: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    batch = SamplingBatch.of([SamplingParams(temperature=1.0)] * rows, range(seed, seed + rows))
    return noise_words(batch.keys[:, Stream.TOKEN], mx.broadcast_to(mx.arange(width), (rows, width)))


def by_all_noise(logits: mx.array, temperature: mx.array, words: tuple[mx.array, mx.array], ids: mx.array) -> mx.array:
    scores = logits.astype(mx.float32) + temperature[:, None, None] * gumbel_at(*words, ids)
    return mx.argmax(scores, axis=-1).astype(mx.int32)


def logits_of(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> mx.array:
    values = rng.normal(scale=3, size=shape)
    if kind == "flat":
        values = np.zeros(shape)
    elif kind == "one":
        values[..., rng.integers(shape[-1])] += 30
    elif kind == "few levels":
        values = np.round(values)
    elif kind == "few tokens":
        values[rng.random(shape) < 0.999] = -math.inf
    elif kind == "one token":
        values[..., 1:] = -math.inf
    elif kind == "steep":
        values *= 1000
    return mx.array(values.astype(np.float32))


@settings(max_examples=some(60), deadline=None)
@given(
    kind=st.sampled_from(["normal", "flat", "one", "few levels", "few tokens", "one token", "steep"]),
    dtype=st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
    temperatures=st.lists(st.sampled_from([0.0, 0.1, 0.6, 1.0, 1.7, 20.0]), min_size=1, max_size=3),
    size=st.sampled_from([8192, SIZE, 3 * 4096, 32_000, 10_002]),
    seed=st.integers(0, 10**6),
)
def test_few_candidates_find_the_same_argmax(
    kind: str, dtype: mx.Dtype, temperatures: list[float], size: int, seed: int
) -> None:
    """For any distribution of mass and any temperatures per row; of equal scores, the first wins."""
    rng = np.random.default_rng(seed)
    logits = logits_of(kind, (len(temperatures), 4, size), rng).astype(dtype)
    words, temperature = words_of(len(temperatures), 4, seed), mx.array(temperatures)
    chosen = noisy_argmax(logits, temperature, words, any_greedy=0.0 in temperatures)
    assert chosen.dtype == mx.int32
    assert mx.array_equal(chosen, by_all_noise(logits, temperature, words, mx.arange(size)))


def test_a_drafts_vocabulary_and_a_trees_nodes() -> None:
    """Ids of the places key the noise; several positions may share it."""
    rng = np.random.default_rng(1)
    ids = mx.array(np.sort(rng.choice(LARGE, SIZE, replace=False)))
    levels = mx.array(rng.integers(0, 3, (2, 9)))
    logits, words, temperature = logits_of("normal", (2, 9, SIZE), rng), words_of(2, 3), mx.array([0.7, 1.2])
    chosen = noisy_argmax(logits, temperature, words, ids, levels)
    each = tuple(mx.take_along_axis(word, levels[..., None], axis=1) for word in words)
    assert mx.array_equal(chosen, by_all_noise(logits, temperature, each, ids))


def test_a_gpu_finds_the_same() -> None:
    rng = np.random.default_rng(2)
    logits, words, temperature = logits_of("normal", (2, 20, SIZE), rng), words_of(2, 20), mx.array([0.7, 0.0])
    here = noisy_argmax(logits, temperature, words)
    with without_shortcuts():
        there = noisy_argmax(logits, temperature, words)
    assert mx.array_equal(here, there)


def test_too_few_candidates_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves that the tests above can fail."""
    logits, words, temperature = (
        logits_of("normal", (1, 200, SIZE), np.random.default_rng(4)),
        words_of(1, 200),
        mx.ones(1),
    )
    expected = by_all_noise(logits, temperature, words, mx.arange(SIZE))
    assert mx.array_equal(noisy_argmax(logits, temperature, words), expected)
    monkeypatch.setattr(module, "CANDIDATES", 1)
    assert mx.sum(noisy_argmax(logits, temperature, words) != expected).item() > 4


@pytest.mark.parametrize("kind", ["flat", "few levels"])
def test_far_fewer_columns_would_suffice(kind: str) -> None:
    """Each further ceiling above the best score is half as likely."""
    logits, words = logits_of(kind, (1, 600, 8192), np.random.default_rng(3)), words_of(1, 600)
    ceilings = logits + gumbel_ceiling(*words, mx.arange(8192)) + 159 * math.log(2)
    best = mx.max(logits + gumbel_at(*words, mx.arange(8192)), axis=-1, keepdims=True)
    count = np.array(mx.sum(ceilings >= best, axis=-1))
    assert count.min() >= 1
    for more in (2, 4, 8):
        assert (count > more).mean() <= (1.062 / 2.062) ** more + 0.05
    assert count.max() < CANDIDATES / 2


def test_no_noise_exceeds_its_ceiling() -> None:
    words = words_of(4, 6)
    noise = np.array(gumbel_at(*words, mx.arange(LARGE)), np.float64)
    # 127 is the bias of a float's exponent, and 32 the hash's bits.
    ceiling = np.array(gumbel_ceiling(*words, mx.arange(LARGE)), np.float64) + 159 * math.log(2)
    gap = ceiling - noise
    assert gap.min() > -1e-4
    assert gap[noise > 5].max() < 0.0597 + 0.01
    assert gap[noise > 5].size > 10_000


@settings(max_examples=some(60), deadline=None)
@given(st.sampled_from([128, 192, 640, 4096, 8192, 8190]), st.integers(1, 64), st.integers(0, 10**6))
def test_columns_contain_the_largest_in_ascending_order(size: int, count: int, seed: int) -> None:
    if not has_columns(size, count):
        assert size < 128 * count or size % 64
        return
    x = np.random.default_rng(seed).permutation(size).astype(np.float32)
    places = np.array(best_columns(mx.array(x)[None], count))[0]
    assert (np.diff(places.astype(int)) > 0).all()
    assert set(np.argsort(x)[-count:]) <= set(places)
    assert len(places) <= 64 * count
