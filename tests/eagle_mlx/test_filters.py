"""Tokens kept by top-k, top-p and min-p: the same as mlx-lm's, without sorting."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from eagle_mlx.decoding import filters
from eagle_mlx.decoding.filters import Filters, bisect, largest
from eagle_mlx.sampling_params import SamplingParams
from tests.fakes import uncompiled
from tests.full import some

Array = np.ndarray[Any, Any]
DTYPES = [mx.float32, mx.bfloat16, mx.float16]
SIZES = [1, 2, 37, 64, 200, 1024, 8192]  # the last two use columns, for up to 8 and 64 candidates


def some_logits(size: int, seed: int, tied: bool, dtype: mx.Dtype, rows: int = 2) -> mx.array:
    values = np.random.default_rng(seed).normal(scale=3, size=(rows, 3, size))
    return mx.array((np.round(values * 2) / 2 if tied else values).astype(np.float32)).astype(dtype)


def kept_by(params: SamplingParams, logits: mx.array) -> Array:
    rows = logits.shape[0]
    left = Filters.of([params] * rows).apply(logits, mx.full((rows, 1, 1), params.temperature))
    assert left.dtype == mx.float32
    return np.array(left > -math.inf)


def kept_by_mlx_lm(params: SamplingParams, logits: mx.array) -> Array:
    """Apply mlx-lm's functions in the order documented here; its own order has top-k last.

    Its top-k keeps exactly k tokens, so ties with the last one are added.
    """
    with uncompiled():
        return _kept_by_mlx_lm(params, logits)


def _kept_by_mlx_lm(params: SamplingParams, logits: mx.array) -> Array:
    x = logits.astype(mx.float32) / params.temperature
    if 0 < params.top_k < x.shape[-1]:
        last = mx.min(mx.where(apply_top_k(x, params.top_k) > -math.inf, x, math.inf), axis=-1, keepdims=True)
        x = mx.where(x >= last, x, -math.inf)
    if params.top_p < 1:
        x = apply_top_p(x - mx.logsumexp(x, axis=-1, keepdims=True), params.top_p)
    if params.min_p > 0:
        x = apply_min_p(x, params.min_p)
    return np.array(x > -math.inf)


def is_close_call(params: SamplingParams, logits: mx.array) -> bool:
    """Return whether rounding decides any token, by the definition in float64."""
    for cell in np.array(logits.astype(mx.float32), np.float64).reshape(-1, logits.shape[-1]):
        ordered = -np.sort(-cell)
        p = np.exp((ordered - ordered[0]) / params.temperature)
        if params.top_k:
            p[ordered < ordered[min(params.top_k, len(p)) - 1]] = 0
        near_p = np.abs((np.cumsum(p) - p) / p.sum() - params.top_p).min() < 1e-5
        if near_p or (params.min_p and np.abs(p - params.min_p).min() < 1e-5):
            return True
    return False


some_filters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 2, 8, 20, 64, 65, 500]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.05]),
    min_p=st.sampled_from([0.0, 0.03, 0.5]),
)


@settings(max_examples=some(150), deadline=None)
@given(
    params=some_filters,
    size=st.sampled_from(SIZES),
    seed=st.integers(0, 10**6),
    tied=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_filters_keep_what_mlx_lm_keeps(
    params: SamplingParams, size: int, seed: int, tied: bool, dtype: mx.Dtype
) -> None:
    logits = some_logits(size, seed, tied, dtype)
    assume(not is_close_call(params, logits))
    np.testing.assert_array_equal(kept_by(params, logits), kept_by_mlx_lm(params, logits))


@settings(max_examples=some(60), deadline=None)
@given(
    top_k=st.integers(2, 64),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    size=st.sampled_from(SIZES),
    seed=st.integers(0, 10**6),
    tied=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_ordering_candidates_keeps_what_bisection_keeps(
    top_k: int, top_p: float, size: int, seed: int, tied: bool, dtype: mx.Dtype
) -> None:
    params, logits = SamplingParams(1.0, top_k=top_k, top_p=top_p), some_logits(size, seed, tied, dtype)
    assume(not is_close_call(params, logits))
    ordered = kept_by(params, logits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "MOST_CANDIDATES", 0)
        np.testing.assert_array_equal(kept_by(params, logits), ordered)


def test_a_vocabulary_of_real_size() -> None:
    logits = some_logits(151_936, 0, False, mx.bfloat16, rows=1)
    for params in (SamplingParams(0.6, top_k=20, top_p=0.95), SamplingParams(0.6, top_p=0.95)):
        assert not is_close_call(params, logits)
        np.testing.assert_array_equal(kept_by(params, logits), kept_by_mlx_lm(params, logits))


def one_step_short(holds: Callable[[mx.array], mx.array], greatest: mx.array) -> mx.array:
    """`bisect` without its last step."""
    steps = 0

    def asked(t: mx.array) -> mx.array:
        nonlocal steps
        steps += 1
        return holds(t) & (steps < 8 * greatest.dtype.size)

    return bisect(asked, greatest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("params", [SamplingParams(1.0, top_k=100), SamplingParams(1.0, top_p=0.9)])
def test_a_bisection_one_step_short_is_detected(
    params: SamplingParams, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = some_logits(1024, 0, False, dtype, rows=20)
    expected = kept_by_mlx_lm(params, logits)
    np.testing.assert_array_equal(kept_by(params, logits), expected)
    monkeypatch.setattr(filters, "bisect", one_step_short)
    assert (kept_by(params, logits) != expected).any()


@settings(max_examples=some(100), deadline=None)
@given(
    values=st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    place=st.integers(0, 19),
    dtype=st.sampled_from(DTYPES),
)
def test_bisection_finds_any_number(values: list[float], place: int, dtype: mx.Dtype) -> None:
    """Zeros of both signs, subnormal numbers and the largest numbers."""
    x = mx.sort(mx.array(values).astype(dtype)).astype(mx.float32)
    wanted = x[min(place, len(values) - 1)]
    threshold = bisect(lambda t: t >= wanted, x[-1:].astype(dtype))
    assert threshold.item() == wanted.item()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_bisection_finds_zero_below_every_number(dtype: mx.Dtype) -> None:
    greatest = mx.arange(1, 0x7C00, dtype=mx.uint16).view(dtype)
    threshold = bisect(lambda t: t >= 0, greatest)
    assert mx.all(threshold == 0)


@settings(max_examples=some(100), deadline=None)
@given(
    size=st.sampled_from([1, 37, 64, 128, 640, 4096, 9000]),
    count=st.integers(1, 64),
    seed=st.integers(0, 10**6),
    tied=st.booleans(),
)
def test_the_largest_numbers_equal_those_of_a_sort(size: int, count: int, seed: int, tied: bool) -> None:
    x, count = some_logits(size, seed, tied, mx.float32), min(count, size)
    values, places = largest(x, count)
    assert values.shape == places.shape == (2, 3, count)
    assert mx.array_equal(mx.sort(values, axis=-1), mx.sort(x, axis=-1)[..., size - count :])
    assert mx.array_equal(mx.take_along_axis(x, places, axis=-1), values)
    assert all(len(set(cell)) == count for row in places.tolist() for cell in row)  # type: ignore[union-attr, arg-type]


def test_tokens_masked_before_are_no_ties() -> None:
    """Fewer tokens than top-k needs; the others are at minus infinity."""
    logits = mx.full((1, 1, 8192), -math.inf)
    logits[0, 0, 5], logits[0, 0, 8000] = 1.0, 0.5
    for params in (SamplingParams(1.0, top_k=20, top_p=0.99), SamplingParams(1.0, top_k=100, top_p=0.99)):
        assert np.flatnonzero(kept_by(params, logits)).tolist() == [5, 8000]
