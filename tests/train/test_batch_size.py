"""The choice of rows, length and passes from the amount of data."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.kinds import LARGEST_STEP, resolve
from eagle_mlx.train.plan import BatchSizePlan, Probe, batches_for
from eagle_mlx.train.plan.batch_size import PASSES, SMALLEST_STEP, UPDATES, best_passes, shape
from tests.full import some


def plan(tokens: int, long: int = 400, speed: Probe | None = None, processes: int = 1, **given: Any) -> BatchSizePlan:
    return batches_for(resolve(TrainConfig.of(**given), 2048), TrainConfig.of(**given), tokens, long, speed, processes)


def of(choice: BatchSizePlan) -> tuple[int, int, int]:
    optimization = choice.config.optimization
    return optimization.rows, optimization.length, optimization.epochs


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (3_000, (1, 256, 4)),
        (61_000, (1, 256, 4)),
        (140_000, (2, 256, 4)),
        (300_000, (2, 512, 4)),
        (924_320, (4, 512, 4)),
        (2_000_000, (8, 512, 4)),
        (4_000_000, (8, 512, 3)),
        (60_000_000, (8, 512, 1)),
    ],
)
def test_more_data_has_larger_steps_then_fewer_passes(tokens: int, expected: tuple[int, int, int]) -> None:
    assert of(plan(tokens)) == expected


@settings(max_examples=some(200), deadline=None)
@given(st.integers(1, 10**8), st.integers(1, 5000), st.integers(1, 4))
def test_a_run_has_1000_to_2000_updates_unless_a_step_is_the_smallest_or_largest(
    tokens: int, long: int, processes: int
) -> None:
    choice = plan(tokens, long, processes=processes)
    rows, length, passes = of(choice)
    step, seen = rows * length, passes * tokens
    assert SMALLEST_STEP <= step <= LARGEST_STEP
    assert 1 <= passes <= PASSES
    if step > SMALLEST_STEP:
        assert seen / (step * processes) >= UPDATES
    if step < LARGEST_STEP:
        assert seen / (step * processes) < 2 * UPDATES + 2


def test_rows_are_as_long_as_most_conversations_and_at_least_two_unless_a_step_is_small() -> None:
    assert shape(4096, 100) == (16, 256)
    assert shape(4096, 400) == (8, 512)
    assert shape(4096, 5000) == (4, 1024)
    assert shape(1024, 5000) == (2, 512)
    assert shape(300, 5000) == (1, 256)


@pytest.mark.parametrize("kept", [{"rows": 3}, {"length": 700}, {"epochs": 7}, {"rows": 4, "length": 64}])
def test_settings_of_the_user_are_kept(kept: dict[str, Any]) -> None:
    choice = plan(300_000, **kept)
    assert {name: choice.config.value(name) for name in kept} == kept
    assert all(choice.config.value(name) for name in ("rows", "length", "epochs"))
    assert not any(f"--{name} " in choice.about for name in kept)
    again = plan(5, **{name: choice.config.value(name) for name in ("rows", "length", "epochs")})
    assert (again.config, again.about) == (choice.config, ""), "a resumed run continues with the choice"


def test_a_time_limit_counts_what_it_allows() -> None:
    speed = Probe(captured=500, learned=300, memory=0, written=60)
    assert of(plan(10**9, speed=speed, minutes=10))[:2] == (1, 256), "180,000 tokens are too few for 512"
    assert of(plan(10, speed=speed, minutes=100))[:2] == (2, 512), "1.8 million"
    assert plan(10**9, max_steps=7).seen == 7 * LARGEST_STEP
    night = plan(500_000, speed=speed, hours=8, data=("self",))
    assert night.tokens == pytest.approx(8 * 3600 / (1 / 60 + 4 / 300), rel=0.01)
    assert of(night) == (4, 512, 4)
    assert "--rows 4 --length 512 --epochs 4:" in night.about


@pytest.mark.parametrize("limit", [{"max_steps": 120}, {"minutes": 10}])
def test_passes_are_not_named_if_they_do_not_limit_the_run(limit: dict[str, int]) -> None:
    about = plan(60_000, speed=Probe(captured=500, learned=300, memory=0, written=60), **limit).about
    assert "--rows" in about
    assert "--epochs" not in about


def test_slow_learning_favors_new_data() -> None:
    assert [best_passes(written, 100) for written in (10, 100, 500, 5000)] == [4, 4, 3, 1]
