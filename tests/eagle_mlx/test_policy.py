"""How many tokens to draft: rules that fix it or follow the acceptance, and what costs are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eagle_mlx.errors import ConfigError
from eagle_mlx.policy import AcceptancePolicy, FixedPolicy, Outcome, Policy, Shape, ShapePolicy, ThroughputPolicy
from eagle_mlx.policy.base import BEHIND
from eagle_mlx.policy.costs import Costs, slope
from eagle_mlx.policy.siblings import Siblings
from eagle_mlx.policy.swings import Swings
from tests.eagle_mlx.worlds import World


@pytest.mark.parametrize("k", [0, 1, 7])
def test_fixed_policy_drafts_k_whatever_happens(k: int) -> None:
    policy: Policy = FixedPolicy(k)
    assert policy.depth(rows=1) == k
    policy.observe(k, drafted=[k, k], accepted=[0, 0], seconds=1.0)
    assert policy.depth(rows=64) == k


@pytest.mark.parametrize("k", [-1, 1.5, True, "4", None])
def test_what_is_no_length_is_refused(k: Any) -> None:
    with pytest.raises(ConfigError, match=r"^k, the number of draft tokens"):
        FixedPolicy(k)
    with pytest.raises(ConfigError, match=r"^k, the number of draft tokens"):
        AcceptancePolicy(k)
    with pytest.raises(ConfigError, match=r"^max_depth, the number of draft tokens"):
        ThroughputPolicy(k)


def test_shares_and_sizes_out_of_range_are_refused() -> None:
    for fields in ({"alpha": 1.1}, {"threshold": -1}, {"alpha": "0.1"}, {"disable_at_rows": 0}):
        with pytest.raises(ConfigError, match=f"^{next(iter(fields))} must be"):
            AcceptancePolicy(**fields)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="^explore must be"):
        ThroughputPolicy(explore=2)


def test_acceptance_average_by_hand() -> None:
    policy = AcceptancePolicy(k=6)
    assert (policy.rate, policy.depth(1)) == (0.7, 4)
    policy.observe(4, [4, 4], [4, 2], 1.0)
    assert policy.rate == pytest.approx(0.7 + 0.1 * (6 / 8 - 0.7))
    policy.observe(4, [0, 0], [0, 0], 1.0)  # nothing was found to draft
    policy.observe(0, [0], [0], 1.0)
    assert policy.rate == pytest.approx(0.705)


@pytest.mark.parametrize(
    ("rate", "k", "depth"),
    [(0.8, 5, 5), (0.79, 5, 3), (0.5, 5, 3), (0.49, 5, 1), (0.3, 5, 1), (0.29, 5, 0), (0.6, 2, 1), (0.6, 0, 0)],
)
def test_bands_of_the_acceptance_rate(rate: float, k: int, depth: int) -> None:
    policy = AcceptancePolicy(k)
    policy.rate = rate
    assert policy.depth(1) == depth
    fixed = AcceptancePolicy(k, adaptive=False)
    fixed.rate = rate
    assert fixed.depth(1) == (k if rate >= 0.3 else 0)


def test_acceptance_policy_is_off_in_large_batches() -> None:
    policy = AcceptancePolicy(k=4, disable_at_rows=8)
    assert [policy.depth(rows) for rows in (1, 7, 8, 64)] == [2, 2, 0, 0]


def test_acceptance_policy_turns_off_probes_and_comes_back() -> None:
    policy = AcceptancePolicy(k=4)
    depths, *_ = World(chance=0.0).run(policy, 500)
    assert depths[:3] == [2, 2, 2]
    assert set(depths[20:]) == {0, 1}
    assert 1 / 40 < np.mean(depths[100:]) < 1 / 30
    depths, *_ = World(chance=0.97).run(policy, 500)
    assert depths[-1] == 4


def test_fixed_policy_draws_the_tree_that_it_was_given() -> None:
    policy = FixedPolicy(4, nodes=12)
    assert isinstance(policy, ShapePolicy)
    assert policy.shape(3, trees=True) == Shape(4, 12)
    assert policy.shape(3, trees=False) == Shape(4, 4) == FixedPolicy(4).shape(3, trees=True)
    assert (Shape(4, 12).cut(2), Shape(4, 12).cut(0), Shape.chain(4).cut(3)) == (Shape(2, 12), Shape(0, 0), Shape(3, 3))
    with pytest.raises(ConfigError, match="^nodes, the number of draft tokens"):
        FixedPolicy(4, nodes=-1)


def test_costs_of_depths_not_tried_lie_on_a_line_and_outliers_are_ignored() -> None:
    costs = ThroughputPolicy().costs
    assert costs.estimate(1, 0) is None
    for seconds in (1.0, 1.0, 50.0):
        costs.add(1, 0, seconds)
    assert costs.estimate(1, 4) == 1.0
    costs.add(1, 2, 1.5)
    assert [costs.estimate(1, depth) for depth in range(4)] == [1.0, 1.25, 1.5, 1.75]
    costs.add(4, 2, 3.0)  # at four rows the same shape, twice as high
    assert [costs.estimate(4, depth) for depth in range(4)] == [2.0, 2.5, 3.0, 3.5]


def test_an_accident_says_little_of_what_drafts_cost() -> None:
    costs = Costs()
    for size, seconds in ((3, 1.3), (4, 1.4), (5, 1.5)):
        for _ in range(3):
            costs.add(1, size, seconds)
    costs.add(1, 6, 32.0)  # the first of its size
    assert costs.estimate(1, 6) <= 3 * 1.6
    assert slope(1, costs) == pytest.approx(0.1)
    for _ in range(4):
        costs.add(1, 6, 1.6)
    assert costs.estimate(1, 6) == 1.6


def test_what_was_measured_at_other_speeds_is_made_comparable() -> None:
    swings = Swings()
    for _ in range(20):
        assert swings.steadied(2.0, 2.0) == pytest.approx(2.0)
    for _ in range(60):
        steadied = swings.steadied(3.0, 2.0)
    assert steadied == pytest.approx(2.0, rel=0.03)
    assert swings.steadied(4.5, None) == pytest.approx(3.0, rel=0.03)
    assert swings.steadied(60.0, 2.0) > 30, "an accident is no change of speed"
    for _ in range(2000):
        swings.steadied(1.0, None)
    assert swings.factor == pytest.approx(1.0, rel=0.01), "a speed that nothing tells of any more is forgotten"


def test_tokens_beside_a_chain_are_priced_and_valued_by_what_they_came_to() -> None:
    rng, siblings = np.random.default_rng(0), Siblings()
    for _ in range(600):
        length, beside, chance = int(rng.integers(3, 9)), int(rng.integers(0, 5)), float(rng.uniform(0.2, 0.9))
        chances = [[chance**place] for place in range(1, length - BEHIND + 1)]
        failed = int(np.cumprod(rng.random(length) < chance).sum())
        aside = 0 if beside and failed == 0 and rng.random() < 0.5 else None
        seconds = 1 + 0.1 * length + 0.04 * beside + rng.normal(0, 0.05)
        siblings.add(Outcome(chances, [length], [failed], beside, [aside]), seconds)
    assert siblings.seconds(1, slope=0.1) == pytest.approx(0.04, abs=0.01)
    assert siblings.seconds(4, slope=0.1) == pytest.approx(0.04, abs=0.01)  # as of the nearest number of rows

    def count(chance: float, pace: float, most: int = 32) -> int:
        limits = siblings.beside(1, pace, 0.1, most, may_try=False)
        return limits(5, [[chance**place] for place in (1, 2, 3)])

    assert count(0.3, 1.5) > count(0.9, 1.5)  # the more doubt the more
    assert count(0.3, 1.5) >= count(0.3, 3.0) >= count(0.3, 100.0) == 0  # the dearer time is the fewer
    assert count(0.3, 0.01) == 2 * 5
    assert count(0.3, 0.01, most=8) == 3
    assert count(0.3, 0.01, most=4) == 0
    assert siblings.beside(1, 0.0, 0.1, 32, may_try=True)(2, []) == 0  # nothing is known of chains so short
