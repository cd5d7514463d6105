"""Draft lengths: fixed or by acceptance; and the parts of costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.errors import ConfigError
from eagle_mlx.plan import CONFIDENCE_LAG, PLAIN, Abilities, Context, Plan
from eagle_mlx.policy import AcceptancePolicy, FixedPolicy, Policy, ThroughputPolicy, base
from eagle_mlx.policy.estimates import AcceptanceByPosition, AcceptanceByRank, ConfidenceCalibration, Costs, Drift
from tests.eagle_mlx.worlds import CHAINS, World, result
from tests.fakes import tiny_target


@pytest.mark.parametrize("k", [0, 1, 7])
def test_fixed_policy_drafts_k_whatever_happens(k: int) -> None:
    policy: Policy = FixedPolicy(k)
    assert policy.plan(Context(1, CHAINS)) == Plan(k)
    policy.observe(result(Plan(k), [k, k], [0, 0], 1.0))
    assert policy.plan(Context(64, CHAINS)) == Plan(k)


@pytest.mark.parametrize("k", [-1, 1.5, True, "4", None])
def test_what_is_no_length_is_refused(k: Any) -> None:
    with pytest.raises(ConfigError, match=r"^k must be an integer from 0 to 1024"):
        FixedPolicy(k)
    with pytest.raises(ConfigError, match=r"^k must be an integer from 0 to 1024"):
        AcceptancePolicy(k)
    with pytest.raises(ConfigError, match=r"^max_depth must be an integer from 0 to 1024"):
        ThroughputPolicy(k)


@pytest.mark.parametrize(
    "plan",
    [None, 3, Plan("3"), Plan(-1)],  # type: ignore[arg-type]
)
def test_what_is_no_plan_is_refused_with_the_name_of_the_policy(plan: Any) -> None:
    class Mine(FixedPolicy):
        def plan(self, context: Context) -> Plan:
            return cast(Plan, plan)

    engine = em.Engine(tiny_target(), em.NgramProposer(), policy=Mine(1))
    with pytest.raises(ConfigError, match=r"^Mine\.plan must return a Plan with depth >= 0; got"):
        engine.generate([1, 2, 1, 2], em.SamplingParams(max_tokens=4))
    engine.use_policy(FixedPolicy(1))
    assert engine.generate([1, 2, 1, 2], em.SamplingParams(max_tokens=4)).finish_reason == "length"


@pytest.mark.parametrize("lacking", ["plan", "observe", "wants_trees"])
def test_what_lacks_a_part_is_no_policy(lacking: str) -> None:
    parts = {name: getattr(FixedPolicy, name) for name in ("plan", "observe", "wants_trees") if name != lacking}
    with pytest.raises(ConfigError, match="policy needs plan, observe and wants_trees"):
        em.Engine(tiny_target(), policy=type("Mine", (), parts)())


def test_shares_and_sizes_out_of_range_are_refused() -> None:
    for fields in ({"alpha": 1.1}, {"threshold": -1}, {"alpha": "0.1"}, {"disable_at_rows": -1}):
        with pytest.raises(ConfigError, match=f"^{next(iter(fields))} must be"):
            AcceptancePolicy(**fields)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="^explore must be"):
        ThroughputPolicy(explore=2)


def test_acceptance_average_by_hand() -> None:
    policy = AcceptancePolicy(k=6)
    assert (policy.acceptance, policy.plan(Context(1, CHAINS))) == (0.7, Plan(4))
    policy.observe(result(Plan(4), [4, 4], [4, 2], 1.0))
    assert policy.acceptance == pytest.approx(0.7 + 0.1 * (6 / 8 - 0.7))
    policy.observe(result(Plan(4), [0, 0], [0, 0], 1.0))  # no draft was found
    policy.observe(result(PLAIN, [0], [0], 1.0))
    assert policy.acceptance == pytest.approx(0.705)


@pytest.mark.parametrize(
    ("rate", "k", "depth"),
    [(0.8, 5, 5), (0.79, 5, 3), (0.5, 5, 3), (0.49, 5, 1), (0.3, 5, 1), (0.29, 5, 0), (0.6, 2, 1), (0.6, 0, 0)],
)
def test_bands_of_the_acceptance_rate(rate: float, k: int, depth: int) -> None:
    policy = AcceptancePolicy(k)
    policy.acceptance = rate
    assert policy.plan(Context(1, CHAINS)) == Plan(depth)
    fixed = AcceptancePolicy(k, adaptive=False)
    fixed.acceptance = rate
    assert fixed.plan(Context(1, CHAINS)) == Plan(k if rate >= 0.3 else 0)


def test_acceptance_policy_is_off_in_large_batches() -> None:
    policy = AcceptancePolicy(k=4, disable_at_rows=8)
    assert [policy.plan(Context(rows, CHAINS)).depth for rows in (1, 7, 8, 64)] == [2, 2, 0, 0]


@pytest.mark.parametrize("can", [CHAINS, Abilities(trees=True)])
def test_policies_tell_the_acceptance_that_they_expect(can: Abilities) -> None:
    throughput = ThroughputPolicy(4, max_nodes=8)
    for policy in (AcceptancePolicy(4), throughput):
        World(chance=0.8, noise=0.0, can=can).run(policy, 400)
        assert policy.acceptance == pytest.approx(0.7, abs=0.2)
    assert (FixedPolicy(4).acceptance, AcceptancePolicy(4).acceptance) == (None, 0.7)
    World(chance=0.0, can=can).run(throughput, 400)
    assert throughput.acceptance < 0.15


def test_acceptance_policy_turns_off_probes_and_comes_back() -> None:
    policy = AcceptancePolicy(k=4)
    world = World(chance=0.0)
    world.run(policy, 500)
    depths = [plan.depth for plan in world.plans]
    assert depths[:3] == [2, 2, 2]
    assert set(depths[20:]) == {0, 1}
    assert 1 / 40 < np.mean(depths[100:]) < 1 / 30
    world.chance = 0.97
    world.run(policy, 500)
    assert world.plans[-1] == Plan(4)


def test_fixed_policy_draws_the_tree_that_it_was_given() -> None:
    policy = FixedPolicy(4, nodes=12)
    trees = Abilities(trees=True)
    assert policy.plan(Context(3, trees)) == Plan(4, 12)
    assert policy.plan(Context(3, CHAINS)) == Plan(4) == FixedPolicy(4).plan(Context(3, trees))
    assert (policy.wants_trees, FixedPolicy(4).wants_trees) == (True, False)
    with pytest.raises(ConfigError, match="^nodes must be"):
        FixedPolicy(4, nodes=-1)


def measure(costs: Costs, kind: str, rows: int, *rounds: tuple[int, float]) -> None:
    for size, seconds in rounds:
        for _ in range(3):
            costs.add(kind, rows, size, seconds)


def test_sizes_that_were_not_measured_follow_the_curve_and_what_drafting_adds() -> None:
    costs = Costs()
    costs.curve = [(1, 2.0), (3, 3.0), (5, 6.0)]
    assert [costs.estimate("chain", 1, depth) for depth in range(5)] == [2.0, 2.5, 3.0, 4.5, 6.0]
    measure(costs, "plain", 1, (0, 1.0))  # the curve at the level of plain rounds
    assert [costs.estimate("chain", 1, depth) for depth in range(5)] == [1.0, 1.25, 1.5, 2.25, 3.0]
    measure(costs, "chain", 1, (1, 1.35), (2, 1.7))
    assert costs.estimate("chain", 1, 4) == pytest.approx(3.0 + 0.4)
    assert costs.estimate("early exit", 1, 4) == pytest.approx(3.4)  # like chains until measured
    assert costs.estimate("n-grams", 1, 4) == pytest.approx(3.0)  # looking up takes no time
    measure(costs, "early exit", 1, (4, 3.7))
    assert (costs.estimate("early exit", 1, 4), costs.estimate("chain", 1, 4)) == (3.7, pytest.approx(3.4))
    assert costs.estimate("plain", 5, 0) == pytest.approx(3.0)  # five rows read as many tokens


def test_n_grams_cost_what_the_curve_says_except_for_a_factor() -> None:
    """They draft in no time. The slope between two noisy sizes would make long drafts look expensive."""
    costs = Costs()
    costs.curve = [(1, 1.0), (5, 1.5), (17, 2.0)]
    measure(costs, "plain", 1, (0, 1.0))
    measure(costs, "n-grams", 1, (3, 1.375), (4, 1.65))
    assert costs.estimate("n-grams", 1, 16) == pytest.approx(1.1 * 2.0)


def test_drafting_adds_what_it_added() -> None:
    costs = Costs()
    costs.curve = [(1, 1.0), (9, 1.0)]
    measure(costs, "plain", 1, (0, 1.0))
    assert costs.estimate("chain", 1, 4) == 1.0
    measure(costs, "chain", 1, (2, 1.5))
    assert [costs.estimate("chain", 1, depth) for depth in (1, 2, 4)] == [1.25, 1.5, 1.5]
    measure(costs, "chain", 1, (1, 1.25))
    assert [costs.estimate("chain", 1, depth) for depth in (1, 2, 4)] == [1.25, 1.5, 2.0]
    assert costs.estimate("plain", 4, 0) == 1.0


def test_an_accident_says_little_of_what_rounds_cost() -> None:
    costs = Costs()
    costs.curve = [(1, 1.0), (9, 1.0)]
    measure(costs, "plain", 1, (0, 1.0))
    measure(costs, "chain", 1, (3, 1.3), (4, 1.4), (5, 1.5))
    costs.add("chain", 1, 6, 32.0)  # the first of its size
    assert costs.estimate("chain", 1, 6) == pytest.approx(1.6)
    for _ in range(3):
        costs.add("chain", 1, 6, 1.6)
    assert costs.estimate("chain", 1, 6) == pytest.approx(1.6)


def test_a_plain_round_takes_no_longer_than_rounds_that_read_more() -> None:
    """Plain rounds that were slowed by other load are not used."""
    costs = Costs()
    costs.curve = [(1, 1.0), (2, 1.44)]
    measure(costs, "plain", 1, (0, 1.6))
    measure(costs, "chain", 1, (1, 1.2))
    assert costs.estimate("plain", 1, 0) == pytest.approx(1.0)


def test_what_was_measured_at_other_speeds_is_made_comparable() -> None:
    drift = Drift()
    for _ in range(20):
        assert drift.normalized(2.0, 2.0) == pytest.approx(2.0)
    for _ in range(60):
        normalized = drift.normalized(3.0, 2.0)
    assert normalized == pytest.approx(2.0, rel=0.03)
    assert drift.normalized(4.5, None) == pytest.approx(3.0, rel=0.03)
    assert drift.normalized(60.0, 2.0) > 30, "an accident is no change of speed"
    for _ in range(2000):
        drift.normalized(1.0, None)
    assert drift.factor == pytest.approx(1.0, rel=0.01), "a speed that nothing tells of any more is forgotten"


def test_acceptance_by_position_counts_what_was_reached() -> None:
    acceptance = AcceptanceByPosition()
    assert acceptance.expected_tokens(2) == 1.75
    for _ in range(300):
        acceptance.add(3, [3, 1])
    # The first token is always accepted, the second in one of two rows, the third whenever the second is.
    assert acceptance.expected_tokens(3) == pytest.approx(1 + 1 + 0.5 + 0.5, abs=0.02)
    assert acceptance.expected_tokens(5) > acceptance.expected_tokens(3)
    for _ in range(300):
        acceptance.add(1, [0, 0])
    assert acceptance.expected_tokens(3) == pytest.approx(1, abs=0.02)


def test_acceptance_by_rank_holds_for_smaller_trees_too() -> None:
    acceptance = AcceptanceByRank()
    for _ in range(300):
        acceptance.add(4, [[0, 3], [0]])
    assert [acceptance.expected_tokens(nodes) for nodes in (0, 1, 3, 4)] == pytest.approx([1, 2, 2, 2.5], abs=0.05)
    assert acceptance.expected_tokens(8) > acceptance.expected_tokens(4)


@pytest.mark.parametrize("claimed", [lambda chance: chance, lambda chance: chance**3])
def test_confidences_need_not_be_right_to_tell_where_to_end(claimed: Callable[[float], float]) -> None:
    rng, calibration = np.random.default_rng(0), ConfidenceCalibration()
    for _ in range(5000):
        chance = float(rng.random())
        kept = CONFIDENCE_LAG + 1 + bool(rng.random() < chance)
        calibration.add([[claimed(chance)]], [CONFIDENCE_LAG + 2], [kept])
    for least in (0.3, 0.5, 0.7):
        assert calibration.threshold(least) == pytest.approx(claimed(least), abs=0.15)
    assert calibration.threshold(0.0) == 0.0
    assert calibration.threshold(1.1) > 1, "nothing is that sure"


@pytest.mark.parametrize("least", [0.06, 0.42, 0.94])
def test_confidences_are_taken_as_acceptance_until_there_are_some(least: float) -> None:
    assert ConfidenceCalibration().threshold(least) == pytest.approx(least)


def test_the_policies_stay_short() -> None:
    """Without blank lines: whoever changes one reads all of them."""
    texts = [file.read_text(encoding="utf-8") for file in Path(base.__file__).parent.glob("*.py")]
    assert sum(bool(line.strip()) for text in texts for line in text.splitlines()) <= 544
