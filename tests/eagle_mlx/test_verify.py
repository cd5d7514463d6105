"""Acceptance: examples by hand, loops that implement the rules, and whole decoding."""

import math
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx.decoding.sampling import SamplingBatch, draft_sample, sample
from eagle_mlx.decoding.verify import Verdict, match, rejection, threshold, verify
from eagle_mlx.sampling_params import SamplingParams
from tests.full import some

Array = np.ndarray[Any, Any]

GREEDY = SamplingParams()
COUPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=0)
REJECTION = SamplingParams(temperature=1.1, top_k=5)
THRESHOLD = SamplingParams(temperature=1.1, acceptance="threshold", threshold=0.2)


def emitted(verdict: Verdict) -> list[list[int]]:
    tokens, accepted = np.array(verdict.tokens), np.array(verdict.accepted)
    assert (verdict.tokens.dtype, verdict.accepted.dtype) == (mx.int32, mx.int32)
    return [list(map(int, row[: count + 1])) for row, count in zip(tokens, accepted, strict=True)]


def test_match_by_hand() -> None:
    samples = mx.array([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    drafts = mx.array([[1, 2], [1, 9], [9, 2], [1, 2], [1, 2]])
    lengths = mx.array([2, 2, 2, 1, 0])
    assert emitted(match(samples, drafts, lengths)) == [[1, 2, 3], [1, 2], [1], [1, 2], [1]]


def test_rejection_by_hand() -> None:
    p = mx.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.2, 0.7, 0.1]])
    q = mx.array([[0.25, 0.25, 0.5], [0.5, 0.5, 0.0]])
    drafts = mx.array([0, 1])
    least_token_first = mx.array([[9.0, 0.0, -9.0]])  # this noise picks the first remaining token
    cases = [
        # p/q is 2 for the first draft and 0.2 for the second; then p - q leaves only token 2.
        ([0.99, 0.19], 2, q, [0, 1, 0]),
        ([0.99, 0.21], 2, q, [0, 2]),
        ([0.99, 0.99], 1, q, [0, 0]),  # one draft: the next token is from p at index 1; the second draft is not read
        ([0.99, 0.01], 0, q, [0]),
        # Without q the first draft passes with p = 0.5, the second with 0.1.
        ([0.49, 0.09], 2, None, [0, 1, 0]),
        ([0.49, 0.11], 2, None, [0, 0]),
        ([0.51, 0.0], 2, None, [1]),  # the rejected draft, token 0, cannot return
    ]
    for u, length, given_q, expected in cases:
        verdict = rejection(
            p[None],
            None if given_q is None else given_q[None],
            drafts[None],
            mx.array([length]),
            mx.array([u]),
            least_token_first[None],
        )
        assert emitted(verdict) == [expected], (u, length, given_q is None)


def test_rejection_always_accepts_a_draft_from_p_itself() -> None:
    p = mx.softmax(mx.array(np.random.default_rng(0).normal(size=(500, 3, 9)).astype(np.float32)), axis=-1)
    drafts = mx.array(np.random.default_rng(1).integers(0, 9, (500, 2)).astype(np.int32))
    u = mx.full((500, 2), 1 - 2.0**-24)
    verdict = rejection(p, p[:, :2], drafts, mx.full((500,), 2, mx.int32), u, mx.zeros((500, 1, 9)))
    assert mx.all(verdict.accepted == 2).item()


def test_a_rejection_caused_by_rounding_draws_from_p() -> None:
    p = mx.array([[[0.0, 1 - 2.0**-23, 0.0, 0.0]] * 2])
    q = mx.array([[[0.0, 1.0, 0.0, 0.0]]])
    arguments = mx.array([[1]]), mx.array([1]), mx.array([[1 - 2.0**-24]]), mx.zeros((1, 1, 4))
    assert emitted(rejection(p, q, *arguments)) == [[1]]
    assert emitted(rejection(p, None, *arguments)) == [[1]]


def test_threshold_by_hand() -> None:
    p = mx.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.2, 0.7, 0.1]])
    samples = mx.array([2, 0, 1])
    for drafts, length, least, expected in [
        ([0, 2], 2, 0.3, [0, 2, 1]),
        ([1, 2], 2, 0.3, [1, 2, 1]),
        ([2, 2], 2, 0.3, [2]),  # too unlikely, although it is the sample; the sample is emitted anyway
        ([0, 0], 2, 0.3, [0, 0]),
        ([0, 2], 1, 0.3, [0, 0]),
        ([0, 2], 0, 0.3, [2]),
        ([0, 2], 2, 1.0, [2]),
    ]:
        verdict = threshold(p[None], samples[None], mx.array([drafts]), mx.array([length]), mx.array([least]))
        assert emitted(verdict) == [expected]


def rejection_by_loop(p: Array, q: Array | None, drafts: Array, lengths: Array, u: Array, gumbel: Array) -> Any:
    """Apply the rule to one row and one token at a time."""
    rows = []
    for b in range(len(drafts)):
        row: list[int] = []
        for i in range(lengths[b]):
            x = drafts[b, i]
            proposed = np.eye(p.shape[-1], dtype=np.float32)[x] if q is None else q[b, i]
            if u[b, i] < p[b, i, x] / proposed[x]:
                row.append(int(x))
                continue
            weights = np.maximum(p[b, i] - proposed, 0)
            break
        else:
            weights = p[b, lengths[b]]
        with np.errstate(divide="ignore"):
            row.append(int(np.argmax(np.log(weights) + gumbel[b, len(row)])))
        rows.append(row)
    return rows


@settings(max_examples=some(100), deadline=None)
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 4),
    vocab=st.integers(2, 9),
    with_q=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_rejection_is_its_definition(rows: int, width: int, vocab: int, with_q: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(vocab, 0.5), (rows, width + 1)).astype(np.float32) + np.float32(1e-6)
    q = rng.dirichlet(np.full(vocab, 0.5), (rows, width)).astype(np.float32) + np.float32(1e-6) if with_q else None
    drafts = rng.integers(0, vocab, (rows, width)).astype(np.int32)
    lengths = rng.integers(0, width + 1, rows).astype(np.int32)
    u = rng.random((rows, width)).astype(np.float32)
    gumbel = rng.gumbel(size=(rows, width + 1, vocab)).astype(np.float32)
    arrays = (None if x is None else mx.array(x) for x in (p, q, drafts, lengths, u, gumbel))
    assert emitted(rejection(*arrays)) == rejection_by_loop(p, q, drafts, lengths, u, gumbel)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", ["refused", "refused without q", "accepted"])
def test_rejection_draws_with_the_weights_of_its_definition(case: str) -> None:
    """Noise that makes all tokens equally good shows each weight: any token wins with 0.1 % more of it."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        p, q = rng.dirichlet(np.ones(8), 2)
        q = np.eye(8)[3] if case == "refused without q" else q
        weights = p if case == "accepted" else np.maximum(p - q, 0)
        tokens = np.flatnonzero(weights > 0.001)
        tie = np.where(weights > 0.001, -np.log(np.maximum(weights, 1e-9)), np.where(weights > 0, -9.0, 5.0))
        noise = tie + 1e-3 * np.eye(8)[tokens]
        rows = len(tokens)
        draft = int(np.argmax(q - p))
        verdict = rejection(
            mx.array(np.tile(p, (rows, 2, 1)), mx.float32),
            None if case == "refused without q" else mx.array(np.tile(q, (rows, 1, 1)), mx.float32),
            mx.full((rows, 1), draft, mx.int32),
            mx.full((rows,), case != "accepted", mx.int32),
            mx.full((rows, 1), 1 - 2.0**-24),
            mx.array(noise[:, None], mx.float32),
        )
        assert emitted(verdict) == [[int(token)] for token in tokens]


@settings(max_examples=some(100), deadline=None)
@given(data=st.data(), rows=st.integers(1, 5), width=st.integers(0, 4))
def test_match_emits_the_samples_up_to_the_first_difference(data: st.DataObject, rows: int, width: int) -> None:
    def draw(count: int, most: int) -> list[list[int]]:
        row = st.lists(st.integers(0, most), min_size=count, max_size=count)
        return data.draw(st.lists(row, min_size=rows, max_size=rows))

    samples, drafts, lengths = draw(width + 1, 1), draw(width, 1), [row[0] for row in draw(1, width)]
    expected = []
    for row, draft, length in zip(samples, drafts, lengths, strict=True):
        same = [a == b for a, b in zip(row, draft[:length], strict=False)]
        expected.append(row[: (same.index(False) if False in same else length) + 1])
    drafted = mx.array(drafts, mx.int32).reshape(rows, width)
    assert emitted(match(mx.array(samples), drafted, mx.array(lengths))) == expected


@dataclass(frozen=True)
class Round:
    """The arguments of `verify` for some rows, with drafts close to the target's text."""

    params: list[SamplingParams]
    seeds: list[int]
    logits: Array
    drafts: Array
    lengths: Array
    q: Array | None
    positions: Array

    @classmethod
    def random(cls, params: list[SamplingParams], width: int, vocab: int, seed: int) -> "Round":
        rng = np.random.default_rng(seed)
        rows = len(params)
        seeds = [int(x) for x in rng.integers(0, 2**40, rows)]
        batch = SamplingBatch.of(params, seeds)
        logits = rng.normal(scale=2, size=(rows, width + 1, vocab)).astype(np.float32)
        positions = (rng.integers(0, 99, (rows, 1)) + np.arange(width + 1)).astype(np.int32)
        noisy = logits + rng.normal(scale=0.7, size=logits.shape).astype(np.float32)
        drawn, probs = draft_sample(mx.array(noisy), batch, mx.array(positions), vocab)
        drafts = np.array(drawn, np.int32)[:, :width]
        q = None if probs is None or not width else np.array(probs, np.float32)[:, :width]
        lengths = rng.integers(0, width + 1, rows).astype(np.int32)
        return cls(params, seeds, logits, drafts, lengths, q, positions)

    def row(self, b: int) -> "Round":
        span = slice(b, b + 1)
        q = None if self.q is None else self.q[span]
        arrays = self.logits[span], self.drafts[span], self.lengths[span], q, self.positions[span]
        return Round(self.params[span], self.seeds[span], *arrays)

    def emitted(self) -> list[list[int]]:
        q = None if self.q is None else mx.array(self.q)
        logits, drafts, lengths, positions = map(mx.array, (self.logits, self.drafts, self.lengths, self.positions))
        return emitted(verify(logits, drafts, lengths, q, SamplingBatch.of(self.params, self.seeds), positions))


mixed_rows = st.lists(st.sampled_from([GREEDY, COUPLED, REJECTION, THRESHOLD]), min_size=1, max_size=5)


@settings(max_examples=some(60), deadline=None)
@given(params=mixed_rows, width=st.integers(0, 4), with_q=st.booleans(), seed=st.integers(0, 10**6))
def test_each_row_of_a_mixed_batch_follows_its_own_rule(
    params: list[SamplingParams], width: int, with_q: bool, seed: int
) -> None:
    case = Round.random(params, width, 31, seed)
    case = case if with_q else replace(case, q=None)
    together = case.emitted()
    assert together == [case.row(b).emitted()[0] for b in range(len(params))]
    plain = np.array(
        sample(mx.array(case.logits), SamplingBatch.of(params, case.seeds), mx.array(case.positions)), dtype=int
    )
    for b, tokens in enumerate(together):
        assert len(tokens) <= case.lengths[b] + 1
        assert tokens[:-1] == list(case.drafts[b, : len(tokens) - 1])
        if params[b].rule == "threshold":
            p = np.array(mx.softmax(mx.array(case.logits[b]) / 1.1, axis=-1))
            assert all(p[i, token] >= 0.199 for i, token in enumerate(tokens[:-1]))
            assert tokens[-1] == plain[b, len(tokens) - 1]
        elif params[b].rule != "rejection":
            assert tokens == list(plain[b, : len(tokens)])


@settings(max_examples=some(40), deadline=None)
@given(params=mixed_rows, seed=st.integers(0, 10**6))
def test_drafts_beyond_a_rows_length_are_not_read(params: list[SamplingParams], seed: int) -> None:
    case = Round.random(params, 4, 31, seed)
    beyond = np.arange(4) >= case.lengths[:, None]
    assert case.emitted() == replace(case, drafts=np.where(beyond, 30 - case.drafts, case.drafts)).emitted()


@pytest.mark.parametrize("params", [GREEDY, COUPLED, REJECTION, THRESHOLD])
def test_a_row_of_nan_harms_no_other(params: SamplingParams) -> None:
    case = Round.random([params, GREEDY, COUPLED, REJECTION, THRESHOLD], 3, 31, seed=1)
    broken = case.logits.copy()
    broken[0] = math.nan
    assert replace(case, logits=broken).emitted()[1:] == case.emitted()[1:]


def test_the_argmax_is_over_the_whole_vocabulary() -> None:
    """A draft can be the best of the tokens that the proposer knows, but not of all."""
    logits = mx.array([[[1.0, 2.0, 0.0, 5.0], [4.0, 0.0, 0.0, 0.0]]])
    batch, positions = SamplingBatch.of([GREEDY], [0]), mx.array([[0, 1]])
    assert emitted(verify(logits, mx.array([[1]]), mx.array([1]), None, batch, positions)) == [[3]]
    assert emitted(verify(logits, mx.array([[3]]), mx.array([1]), None, batch, positions)) == [[3, 0]]
