"""The distribution of sampling parameters, and noise that depends only on seed and position."""

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eagle_mlx.decoding.noise import uniform_noise
from eagle_mlx.decoding.sampling import (
    Logprobs,
    SamplingBatch,
    Stream,
    distribution,
    draft_sample,
    gumbel,
    logprobs_of,
    sample,
    surprise_of,
)
from eagle_mlx.errors import ConfigError
from eagle_mlx.sampling_params import SamplingParams
from tests.full import some

VOCAB = 37  # odd, so that rows do not begin at multiples of a vector register

some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, VOCAB, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.05]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.sampled_from([None, 7]),
    acceptance=st.sampled_from(["auto", "coupled", "rejection"]),
)
seeds = st.integers(0, 2**64 - 1)


def normal_logits(*shape: int, seed: int = 0, scale: float = 2.0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(scale=scale, size=shape).astype(np.float32))


def one(params: SamplingParams, seed: int = 0) -> SamplingBatch:
    return SamplingBatch.of([params], [seed])


def probs_of(probabilities: list[float], params: SamplingParams) -> list[float]:
    return list(np.array(distribution(mx.log(mx.array(probabilities))[None, None], one(params))[0, 0]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", 2**64),
        ("seed", 1.0),
        ("seed", True),
        ("max_tokens", 0),
        ("stop_token_ids", (3, -1)),
        ("acceptance", "lossy"),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.nan),
        ("presence_penalty", math.inf),
        ("frequency_penalty", "much"),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: math.nan}),
        ("logits_processors", ["no callable"]),
        ("grammar", 3),
        ("stop", ("a", "")),
        ("stop", (3,)),
        ("stop", None),
        ("stop_token_ids", 3),
        ("logits_processors", len),
        ("logit_bias", 5),
        ("top_logprobs", 21),
        ("threshold", 0.0),
        ("threshold", 1.1),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_field_s_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{field} must be .*; got"):
        SamplingParams(**{field: value})


def test_params_are_plain_values() -> None:
    params = SamplingParams(stop="end", logit_bias={3: 1}, stop_token_ids=[4])  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (("end",), (4,))
    assert hash(params) == hash(replace(params))
    assert params == replace(params)
    assert params != replace(params, logit_bias={})


@pytest.mark.parametrize(
    ("params", "rule"),
    [
        (SamplingParams(), "greedy"),
        (SamplingParams(seed=3, acceptance="rejection"), "greedy"),
        (SamplingParams(temperature=1e-9), "greedy"),
        (SamplingParams(temperature=1, top_k=1), "greedy"),
        (SamplingParams(temperature=1), "rejection"),
        (SamplingParams(temperature=1, seed=0), "coupled"),
        (SamplingParams(temperature=1, acceptance="coupled"), "coupled"),
        (SamplingParams(temperature=1, seed=0, acceptance="rejection"), "rejection"),
        (SamplingParams(temperature=1, acceptance="threshold"), "threshold"),
        (SamplingParams(acceptance="threshold"), "greedy"),
    ],
)
def test_rule(params: SamplingParams, rule: str) -> None:
    assert params.rule == rule
    assert params.lossless == (rule != "threshold")


def test_flags_show_what_some_row_needs() -> None:
    greedy, coupled = SamplingParams(top_p=0.5), SamplingParams(temperature=1, seed=1)
    batch = SamplingBatch.of([greedy, greedy], [1, 2])
    assert (batch.all_greedy, batch.rules, batch.any_filtered) == (True, {"greedy"}, False)
    batch = SamplingBatch.of([greedy, coupled], [1, 2])
    assert (batch.all_greedy, batch.rules, batch.any_filtered) == (False, {"greedy", "coupled"}, False)
    batch = SamplingBatch.of([replace(coupled, min_p=0.1), SamplingParams(temperature=1)], [1, 2])
    assert (batch.rules, batch.any_filtered) == ({"coupled", "rejection"}, True)
    with pytest.raises(ValueError, match="zip"):
        SamplingBatch.of([greedy, greedy], [1])
    whole = SamplingBatch.of([SamplingParams(temperature=1, top_p=1, min_p=1)], [1])  # integers in place of floats
    assert {array.dtype for array in (whole.temperature, whole.filters.top_p, whole.filters.min_p)} == {mx.float32}
    empty = SamplingBatch.of([], [])
    assert (empty.all_greedy, empty.rules, empty.any_filtered) == (True, set(), False)
    assert (empty.keys.shape, empty.temperature.shape) == ((0, len(Stream), 2), (0,))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.5}, [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 9}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_p": 0.45}, [1, 0, 0, 0]),
        ({"top_p": 0.7}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.8}, [5 / 9, 2.5 / 9, 1.5 / 9, 0]),
        ({"top_p": 1e-300}, [1, 0, 0, 0]),
        ({"min_p": 0.4}, [2 / 3, 1 / 3, 0, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0]),
        # top_p applies after top_k: 2/3 alone reaches 0.6, but 0.5 of the whole does not.
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),
        ({"top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),
        # temperature applies before top_p: 0.25 / 0.345 reaches 0.7.
        ({"temperature": 0.5, "top_p": 0.7}, [1, 0, 0, 0]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0]),
    ],
)
def test_distribution_by_hand(fields: dict[str, Any], expected: list[float]) -> None:
    params = SamplingParams(**{"temperature": 1.0, **fields})
    np.testing.assert_allclose(probs_of([0.5, 0.25, 0.15, 0.1], params), expected, atol=1e-6)


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    by_rank = probs_of([0.4, 0.2, 0.2, 0.2], SamplingParams(1.0, top_k=2))
    np.testing.assert_allclose(by_rank, [0.4, 0.2, 0.2, 0.2], atol=1e-6)
    by_mass = probs_of([0.3, 0.3, 0.2, 0.2], SamplingParams(1.0, top_p=0.2))
    np.testing.assert_allclose(by_mass, [0.5, 0.5, 0, 0], atol=1e-6)


def test_tokens_masked_before_sampling_stay_out() -> None:
    logits = mx.array([[[0.0, -math.inf, 1.0, -math.inf]]])
    for fields in ({}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.01}):
        batch = one(SamplingParams(temperature=1.0, **fields))
        np.testing.assert_allclose(distribution(logits, batch)[0, 0], [0.26894, 0, 0.73106, 0], atol=1e-5)
        draws = sample(mx.broadcast_to(logits, (1, 400, 4)), batch, mx.arange(400)[None])
        assert set(np.array(draws[0])) == {0, 2}


def numpy_distribution(logits: np.ndarray[Any, Any], params: SamplingParams) -> np.ndarray[Any, Any]:
    """Compute the definition in float64, token by token. Examples too close to a cut are dropped."""
    if params.rule == "greedy":
        return np.array(np.arange(len(logits)) == np.argmax(logits), float)
    order = np.argsort(-logits)
    scaled = logits[order].astype(np.float64) / params.temperature
    p: np.ndarray[Any, Any] = np.exp(scaled - scaled[0])
    if params.top_k:
        p[params.top_k :] = 0
    p /= p.sum()
    before = np.cumsum(p) - p
    if params.top_p < 1:
        assume(np.abs(before - params.top_p).min() > 1e-5)
        p[before >= params.top_p] = 0
    if 0 < params.min_p < 1:
        assume(np.abs(p / p[0] - params.min_p).min() > 1e-5)
        p[p / p[0] < params.min_p] = 0
    if params.min_p == 1:
        p[1:] = 0
    return np.array(p[np.argsort(order)] / p.sum())


@settings(max_examples=some(150), deadline=None)
@given(rows=st.lists(some_params, min_size=1, max_size=4), seed=st.integers(0, 10**6))
def test_distribution_is_the_definition_row_by_row(rows: list[SamplingParams], seed: int) -> None:
    logits = normal_logits(len(rows), 2, VOCAB, seed=seed)
    expected = [[numpy_distribution(np.array(cell), row) for cell in logits[i]] for i, row in enumerate(rows)]
    actual = np.array(distribution(logits, SamplingBatch.of(rows, range(len(rows)))))
    np.testing.assert_allclose(actual, expected, atol=2e-6)
    np.testing.assert_array_equal(actual > 0, np.array(expected) > 0)


@settings(max_examples=some(100), deadline=None)
@given(
    rows=st.lists(st.tuples(some_params, seeds), min_size=2, max_size=4),
    place=st.integers(0, 3),
    width=st.integers(1, 4),
    start=st.integers(0, 10**6),
)
def test_a_row_does_not_depend_on_other_rows(
    rows: list[tuple[SamplingParams, int]], place: int, width: int, start: int
) -> None:
    place %= len(rows)
    logits = normal_logits(len(rows), width, VOCAB, seed=start)
    positions = mx.arange(start, start + width)[None] + 3 * mx.arange(len(rows))[:, None]
    batch = SamplingBatch.of([p for p, _ in rows], [s for _, s in rows])
    alone = SamplingBatch.of([rows[place][0]], [rows[place][1]])
    row, its = logits[place : place + 1], positions[place : place + 1]
    in_company = [sample(logits, batch, positions), distribution(logits, batch), gumbel(batch, positions, VOCAB)]
    by_itself = [sample(row, alone, its), distribution(row, alone), gumbel(alone, its, VOCAB)]
    for company, solitary in zip(in_company, by_itself, strict=True):
        assert mx.array_equal(company[place : place + 1], solitary)
    for i in range(width):
        assert mx.array_equal(sample(row[:, i : i + 1], alone, its[:, i : i + 1])[:, 0], by_itself[0][:, i])


def test_noise_changes_with_seed_position_and_stream() -> None:
    params = SamplingParams(temperature=1.0)
    positions = mx.array([[0, 1, 2, 256, 2**16, 2**31 - 1]])
    draws = [
        gumbel(one(params, seed), positions, 8, stream)[0, i]
        for seed in (0, 1, 2**32, 2**63)
        for stream in (Stream.TOKEN, Stream.DRAFT)
        for i in range(positions.shape[1])
    ]
    table = np.array(mx.stack(draws))
    assert len(np.unique(table.round(5), axis=0)) == len(draws)
    assert np.abs(np.corrcoef(table.reshape(8, -1)) - np.eye(8)).max() < 0.6
    assert mx.array_equal(gumbel(one(params, -1), positions, 8), gumbel(one(params, 2**64 - 1), positions, 8))


def test_only_coupled_rows_draft_with_the_targets_noise() -> None:
    rows = [SamplingParams(temperature=1.0, acceptance="coupled"), SamplingParams(temperature=1.0)]
    batch = SamplingBatch.of(rows, [5, 5])
    positions = mx.array([[3, 4], [3, 4]])
    token, draft = gumbel(batch, positions, VOCAB), gumbel(batch, positions, VOCAB, Stream.DRAFT)
    assert mx.array_equal(token[0], token[1])
    assert mx.array_equal(token[0], draft[0])
    assert not mx.any(token[1] == draft[1]).item()
    assert not mx.any(
        uniform_noise(batch.keys[:, Stream.ACCEPT], positions) == uniform_noise(batch.keys[:, Stream.TOKEN], positions)
    ).item()


def test_noise_has_its_distribution() -> None:
    batch, positions = one(SamplingParams(temperature=1.0)), mx.arange(200)[None]
    noise = np.array(gumbel(batch, positions, 1000)).ravel()
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.57722, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.03)
    for x in (-1.0, 0.0, 1.0, 3.0, 6.0):
        assert (noise <= x).mean() == pytest.approx(math.exp(-math.exp(-x)), abs=0.004)
    u = np.array(uniform_noise(batch.keys[:, Stream.ACCEPT], mx.arange(100_000)[None]))
    assert 0 <= u.min() < 1e-3
    assert 1 - 1e-3 < u.max() < 1
    assert np.histogram(u, 20, (0, 1))[0] / u.size == pytest.approx(0.05, abs=0.004)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_greedy_rows_give_the_first_argmax_in_any_company(dtype: mx.Dtype) -> None:
    logits = normal_logits(2, 3, VOCAB).astype(dtype)
    logits[0, 1, 30] = logits[0, 1, 20] = 50.0
    greedy, warm = SamplingParams(top_p=0.1), SamplingParams(temperature=1.0, top_k=3, seed=1)
    positions = mx.zeros((2, 3), mx.int32)
    expected = mx.argmax(logits, axis=-1)
    assert expected[0, 1].item() == 20
    for rows in ([greedy, greedy], [greedy, warm]):
        batch = SamplingBatch.of(rows, [0, 1])
        tokens = sample(logits, batch, positions)
        assert tokens.dtype == mx.int32
        assert mx.array_equal(tokens[0], expected[0])
        assert mx.array_equal(mx.argmax(distribution(logits, batch)[0], axis=-1), expected[0])
        assert mx.array_equal(mx.max(distribution(logits, batch)[0], axis=-1), mx.ones(3))


def test_draft_of_the_targets_own_distribution_is_the_coupled_sample() -> None:
    rows = [SamplingParams(temperature=1.0, seed=1, top_p=0.9), SamplingParams(), SamplingParams(temperature=1.0)]
    batch = SamplingBatch.of(rows * 20, range(60))
    logits, positions = normal_logits(60, VOCAB)[:, None], mx.arange(60)[:, None]
    drafts, q = draft_sample(logits, batch, positions, VOCAB)
    equal = np.array(drafts == sample(logits, batch, positions))[:, 0]
    assert all(equal[0::3])
    assert all(equal[1::3])
    assert not all(equal[2::3])
    assert q is not None
    assert mx.array_equal(q, distribution(logits, batch))


def test_draft_vocabulary_shares_the_noise_of_the_targets_tokens() -> None:
    token_ids = mx.array([1, 4, 9, 16, 25, 36])
    full = mx.full((50, VOCAB), -math.inf)
    reduced, positions = normal_logits(50, 6), mx.arange(50)[:, None]
    full[:, token_ids] = reduced
    rows = [SamplingParams(temperature=0.8, acceptance="coupled"), SamplingParams(temperature=0.8), SamplingParams()]
    for params, drawn_from in zip(rows, (False, True, False), strict=True):
        batch = SamplingBatch.of([params] * 50, range(50))
        tokens, q = draft_sample(reduced[:, None], batch, positions, VOCAB, token_ids)
        expected, expected_q = draft_sample(full[:, None], batch, positions, VOCAB)
        assert tokens.tolist() == expected.tolist()
        assert tokens.dtype == mx.int32
        assert (q is not None) == drawn_from
        if q is not None and expected_q is not None:
            np.testing.assert_allclose(q, expected_q, atol=1e-6)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.5)])
def test_confidences_of_bfloat16_logits_are_float32(params: SamplingParams) -> None:
    scale = params.temperature or 1.0
    logits = mx.array([[[scale * (20.0 + 5.0), scale * 20.0, *[-scale * 90.0] * 6]]]).astype(mx.bfloat16)
    surprise = surprise_of(logits, SamplingBatch.of([params], [0]))
    assert surprise.dtype == mx.float32
    assert math.exp(-float(surprise[0, 0])) == pytest.approx(1 / (1 + math.exp(-5.0)), abs=1e-4)  # 0.9933


@pytest.mark.parametrize("top", [0, 1, 5, 100])
def test_logprobs_bring_no_more_tokens_to_the_host_than_were_requested(top: int) -> None:
    logits = mx.array(np.random.default_rng(0).normal(size=(2, 3, 50)), mx.float32)
    tokens = mx.array([[1, 2, 3], [4, 5, 49]])
    chosen, ids, values = logprobs_of(logits, tokens, top)
    expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    assert (chosen.shape, ids.shape, values.shape) == ((2, 3), *[(2, 3, min(top, 50))] * 2)
    np.testing.assert_allclose(chosen, np.take_along_axis(expected, np.array(tokens)[..., None], -1)[..., 0], atol=1e-5)
    np.testing.assert_array_equal(ids, np.argsort(-expected, axis=-1)[..., :top])
    np.testing.assert_allclose(values, -np.sort(-expected, axis=-1)[..., :top], atol=1e-5)


def test_logprobs_are_computed_for_the_rows_and_the_tokens_that_were_requested() -> None:
    logits = mx.array(np.random.default_rng(0).normal(size=(3, 2, 50)), mx.float32)
    tokens = mx.array([[1, 2], [3, 4], [5, 6]])
    params = [SamplingParams(), SamplingParams(logprobs=True, top_logprobs=4), SamplingParams(logprobs=True)]
    computed = Logprobs.of(params, logits, tokens)
    assert [array.shape for array in computed.arrays] == [(2, 2), (2, 2, 4), (2, 2, 4)]
    scores = computed.read([[1, 2], [3, 4], [5]])
    assert {row: [len(score.top) for score in own] for row, own in scores.items()} == {1: [4, 4], 2: [0]}
    assert [score.token for score in scores[2]] == [5]
    assert Logprobs.of(params[1:], logits[1:], tokens[1:]).arrays[0].shape == (2, 2)
