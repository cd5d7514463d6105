"""The judge's statistics: an interval over conversations, and a verdict that seldom errs."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_mlx.paired import Decoded, Gain, conversations_for, gain_of, t_quantile, tau, tau_interval
from tests.full import in_full, in_turn

TRIALS = 200
SIZES = in_turn((8, 20, 40))


@pytest.fixture(scope="module")
def simulation() -> dict[str, Any]:
    """Return benchmarks/judge.py, which draws pairs of heads from the recorded rounds of the included head."""
    return runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "judge.py"))


@pytest.mark.parametrize("count", SIZES)
def test_of_200_pairs_of_equal_heads_at_most_5_percent_are_called_better(
    simulation: dict[str, Any], count: int
) -> None:
    seen = simulation["verdicts"](simulation["World"].read(), count, 0.0, TRIALS)
    assert seen["better"] <= 0.05 * TRIALS
    assert seen["better"] + seen["worse"] <= 0.08 * TRIALS


@pytest.mark.parametrize("count", SIZES)
def test_a_head_that_is_worse_by_5_percent_is_never_taken(simulation: dict[str, Any], count: int) -> None:
    assert simulation["verdicts"](simulation["World"].read(), count, -0.05, TRIALS)["better"] == 0


def test_a_clear_gain_is_told_and_the_number_of_prompts_for_it_is_right(simulation: dict[str, Any]) -> None:
    """A gain needs about as many prompts as `needed` says for a telling in 80 % of comparisons."""
    world, rng = simulation["World"].read(), np.random.default_rng(0)
    needed = gain_of(*world.pair(400, rng, 0.1)).needed
    assert needed is not None
    trials = in_full(TRIALS, 60)
    told = simulation["verdicts"](world, needed, 0.1, trials)["better"] / trials
    assert 0.6 < told < 0.97


def decoded(*rounds: int, tokens: int = 100) -> list[Decoded]:
    return [Decoded(tokens, count) for count in rounds]


def test_the_gain_is_that_of_all_tokens_over_all_rounds() -> None:
    first, second = decoded(50, 40, 30, 60, 20, 45), decoded(45, 40, 28, 50, 20, 40)
    gain = gain_of(first, second)
    assert tau(first) == 600 / 245
    assert gain.gain == pytest.approx(245 / 223 - 1)
    assert gain.low is not None
    assert gain.high is not None
    assert gain.low < gain.gain < gain.high
    back = gain_of(second, first)
    assert (1 + back.gain) * (1 + gain.gain) == pytest.approx(1)
    assert back.low == pytest.approx(1 / (1 + gain.high) - 1)


def test_dearer_rounds_turn_the_verdict() -> None:
    first, second = decoded(50, 40, 31, 60, 20, 45, 33), decoded(44, 36, 28, 52, 18, 40, 30)
    assert gain_of(first, second).verdict == "better"
    slower = gain_of(first, second, factor=0.8)
    assert slower.verdict == "worse"
    assert 1 + slower.gain == pytest.approx(0.8 * (1 + gain_of(first, second).gain))


def test_95_percent_of_the_intervals_of_tau_contain_it() -> None:
    rng, hits, trials = np.random.default_rng(0), 0, 500
    for _ in range(trials):
        rounds = rng.integers(20, 60, 8)
        parts = [Decoded(int(count * rng.normal(2, 0.3)), int(count)) for count in rounds]
        half = tau_interval(parts)
        assert half is not None
        hits += abs(tau(parts) - 2) <= half
    assert 0.92 < hits / trials < 0.98
    assert tau_interval(parts[:5]) is None


def test_equal_drafts_are_not_told_apart() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        rounds = rng.integers(1, 30, 6).tolist()
        drafts = [
            Decoded(tokens, count) for tokens, count in zip(rng.integers(30, 90, 6).tolist(), rounds, strict=True)
        ]
        gain = gain_of(drafts, list(drafts))
        assert (gain.gain, gain.verdict) == (0, "not told apart")


def test_few_conversations_tell_nothing() -> None:
    first, second = decoded(50, 50, 50, 50, 50), decoded(25, 26, 25, 25, 25)
    gain = gain_of(first, second)
    assert (gain.verdict, gain.low, gain.high, gain.needed) == ("not told apart", None, None, None)
    assert gain_of(decoded(*[50] * 6), decoded(*[25] * 6)).verdict == "better"
    assert gain_of([], []).conversations == 0
    with pytest.raises(ValueError, match="shorter"):
        gain_of(first, second[1:])


def test_texts_of_different_lengths_may_be_compared() -> None:
    """Rounding may end a text of one of them earlier; τ is per token."""
    first = [Decoded(100, 50), Decoded(80, 40), Decoded(60, 30)] * 3
    second = [Decoded(90, 45), Decoded(80, 40), Decoded(60, 30)] * 3
    gain = gain_of(first, second)
    assert (gain.gain, gain.verdict) == (pytest.approx(0, abs=1e-12), "not told apart")


@pytest.mark.parametrize(("degrees", "quantile"), [(5, 2.5706), (7, 2.3646), (19, 2.0930), (39, 2.0227)])
def test_quantiles_of_students_t(degrees: int, quantile: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(quantile, abs=1e-3)


def test_the_number_of_conversations_falls_with_the_square_of_the_gain() -> None:
    assert conversations_for(0.03, 0.1) == math.ceil((2.80159 * 0.1 / math.log(1.03)) ** 2)
    assert conversations_for(0.06, 0.1) < conversations_for(0.03, 0.1) / 3
    assert conversations_for(0.0, 0.1) == conversations_for(0.01, 0.1), "nobody looks for less than 1 %"
    assert conversations_for(10.0, 0.1) == 6


@pytest.mark.parametrize(
    ("gain", "advice"),
    [
        (
            Gain(0.02, -0.01, 0.05, "not told apart", 40, 95),
            "about 55 prompts more would tell a difference of 2.0%",
        ),
        (Gain(0.02, -0.01, 0.05, "not told apart", 40, 40), "a difference of 2.0% would probably have been told"),
        (Gain(0.001, -0.01, 0.02, "not told apart", 40, 95), "more would tell a difference of 1.0%"),
        (Gain(0.02, None, None, "not told apart", 5, None), "give at least 6 prompts"),
    ],
)
def test_what_to_do_if_they_are_not_told_apart(gain: Gain, advice: str) -> None:
    assert advice in gain.advice
