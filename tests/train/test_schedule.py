from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.step.optimizers import Cosine, learning_rate_factor, span_of


def test_warm_up_then_cosine() -> None:
    assert learning_rate_factor(0.05, 0.1, 0.0) == pytest.approx(0.5)
    assert learning_rate_factor(0.1, 0.1, 0.0) == pytest.approx(1.0)
    assert learning_rate_factor(0.55, 0.1, 0.0) == pytest.approx(0.5)
    assert learning_rate_factor(1.0, 0.1, 0.2) == pytest.approx(0.2)
    assert learning_rate_factor(2.0, 0.1, 0.2) == pytest.approx(0.2)
    assert learning_rate_factor(1.0, 1.0, 0.2) == pytest.approx(0.2)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_the_factor_stays_between_zero_and_one(progress: float, warmup: float, final: float) -> None:
    assert 0 <= learning_rate_factor(progress, warmup, final) <= 1
    if progress >= warmup:
        assert learning_rate_factor(progress, warmup, final) >= final - 1e-9


def test_minutes_and_steps_before_epochs() -> None:
    assert span_of(TrainConfig.of(minutes=2.0), 10) == Cosine(seconds=120.0)
    assert span_of(TrainConfig.of(minutes=2.0, max_steps=5), 10) == Cosine(seconds=120.0, steps=5)
    assert span_of(TrainConfig.of(max_steps=5), 10) == Cosine(steps=5)
    assert span_of(TrainConfig.of(epochs=3), 10) == Cosine(steps=30)


def test_a_span_of_steps_and_one_of_time() -> None:
    steps, time = Cosine(steps=10), Cosine(seconds=60.0)
    assert 0 < steps.progress(0, 99.0) < steps.progress(9, 0.0) < 1
    assert not steps.is_over(9, 1e9)
    assert steps.is_over(10, 0.0)
    assert time.progress(5, 30.0) == 0.5
    assert not time.is_over(10**6, 59.0)
    assert time.is_over(0, 60.0)


def test_of_time_and_steps_the_first_that_is_over_ends_a_span() -> None:
    both = Cosine(seconds=60.0, steps=10)
    assert both.progress(5, 6.0) == 0.55
    assert both.progress(0, 30.0) == 0.5
    assert not both.is_over(9, 59.0)
    assert both.is_over(10, 0.0)
    assert both.is_over(0, 60.0)
