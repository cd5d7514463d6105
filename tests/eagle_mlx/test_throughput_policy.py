"""How many tokens to draft by what pays: against simulated costs and acceptance, without a clock."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_mlx.plan import CONFIDENCE_LAG, PLAIN, Abilities, Context, Plan
from eagle_mlx.policy import ThroughputPolicy
from eagle_mlx.policy.throughput import levels_for
from tests.eagle_mlx.worlds import CHAINS, EARLY_EXITS, Cost, Forest, Moods, World, result
from tests.full import diagonal, in_full, mixed

COSTS = [
    lambda rows, depth: 1 + 0.1 * depth + (0.1 if depth else 0),
    lambda rows, depth: 1 + 0.02 * depth,
    lambda rows, depth: (1, 1.9, 2.0, 2.1, 2.2, 2.3)[depth],  # as with 4 bits on a GPU: two tokens cost much more
    lambda rows, depth: 1 + 0.06 * rows * depth,
]


@pytest.mark.parametrize(("cost", "chance", "rows"), mixed(COSTS, [0.3, 0.6, 0.8, 0.95], [1, 8]))
def test_throughput_policy_converges_to_the_best_depth(cost: Cost, chance: float, rows: int) -> None:
    world, policy = World(chance, cost), ThroughputPolicy(max_depth=5)
    world.run(policy, 400, rows)
    depths, *_ = world.run(policy, 1000, rows)
    speed, best, plain = (world.speed(rows, *d) for d in (depths, [world.best(rows, 5)], [0]))
    assert speed > (0.95 if best > 1.1 * plain else 0.9) * best  # close races are left to plain decoding
    assert speed > 0.97 * plain


STEPS = (1, 1.1, 1.2, 1.5, 1.55, 2.1, 2.15, 2.7, 2.75)
"""Seconds by depth where they rise in steps: 4, 6 and 8 positions took 1.5, 2.1 and 2.7 of one on an M4 (mlx#3839)."""


@pytest.mark.parametrize(("chance", "rows"), diagonal([0.3, 0.6, 0.8, 0.95], [1, 8]))
def test_steps_of_the_costs_do_not_hide_the_best_depth(chance: float, rows: int) -> None:
    shares = []
    for seed in in_full(range(4), range(2)):
        world, policy = World(chance, lambda rows, depth: STEPS[depth], np.random.default_rng(seed)), ThroughputPolicy()
        world.run(policy, 400, rows)
        depths, *_ = world.run(policy, 2000, rows)
        shares.append(world.speed(rows, *depths) / world.speed(rows, world.best(rows, 8)))
    assert np.mean(shares) > 0.98


@pytest.mark.parametrize(("chance", "insight"), diagonal([0.3, 0.6, 0.8, 0.95], [0.0, 1.0]))
def test_early_exits_know_of_steps(chance: float, insight: float) -> None:
    """With what a proposer knows of its drafts, and where it knows nothing."""
    shares = []
    for seed in in_full(range(3), range(2)):
        moods = Moods(chance, lambda _, d: STEPS[d], np.random.default_rng(seed), hard=0.8 * chance, insight=insight)
        policy = ThroughputPolicy()
        moods.draft(policy, 400)
        shares.append(moods.draft(policy, 1500)[1] / moods.fastest(1))
    assert np.mean(shares) > 0.96


@pytest.mark.parametrize("excess", [0.1, 0.5, 3.0])
def test_a_useless_proposer_costs_less_than_three_percent(excess: float) -> None:
    world, policy = World(0.0, lambda rows, depth: 1 + excess * depth), ThroughputPolicy()
    depths, seconds, tokens = world.run(policy, 3000)
    # Three plain rounds for a draft token are more than any takes: the target itself takes one.
    assert seconds / tokens < (1.03 if excess < 1 else 1.035)
    assert depths[-100:].count(0) >= 95
    assert any(depths[-1000:])  # it still looks


@pytest.mark.parametrize(("noise", "busy"), diagonal([0.02, 0.3], [1.0, 5.0]))
def test_a_machine_with_other_work_does_not_mislead_it_for_long(noise: float, busy: float) -> None:
    shares = []
    for seed in in_full(range(4), range(2)):
        useless = World(0.0, rng=np.random.default_rng(seed), noise=noise, busy=busy)
        _, seconds, tokens = useless.run(ThroughputPolicy(), 3000)
        shares.append(seconds / tokens)
    # Plans are compared by medians of seven rounds: where noise and load are both this large, those err together.
    assert np.mean(shares) < (1.05 if (noise, busy) == (0.3, 5.0) else 1.03)
    good, policy = World(0.85, noise=noise, busy=busy), ThroughputPolicy()
    good.run(policy, 400)
    _, seconds, tokens = good.run(policy, 3000)
    assert tokens / seconds > 0.9 * good.speed(1, good.best(1, 5))


@pytest.mark.parametrize("seed", range(4))
def test_plain_rounds_of_a_busy_moment_are_soon_taken_again(seed: int) -> None:
    world = World(0.3, lambda rows, depth: 1 + 0.4 * depth, np.random.default_rng(seed))
    policy = ThroughputPolicy()
    world.run(policy, 300)
    for _ in range(40):
        if policy.plan(Context(1, CHAINS)) == PLAIN:
            policy.observe(result(PLAIN, [0], [0], 1.5))
    depths, *_ = world.run(policy, 200)
    assert sum(map(bool, depths)) < 100


@pytest.mark.parametrize("seed", in_full(range(16), range(4)))
def test_first_drafts_that_take_long_are_soon_tried_again(seed: int) -> None:
    """Else the first answers of a process would be written plainly, where drafts are worth 1.8 times as much."""
    world, policy = World(0.7, rng=np.random.default_rng(seed), compiling=14), ThroughputPolicy()
    depths, *_ = world.run(policy, 300)
    assert np.mean(np.array(depths[150:]) > 0) > 0.8


def test_drafting_comes_back_when_acceptance_does() -> None:
    policy = ThroughputPolicy()
    depths, *_ = World(0.0).run(policy, 1000)
    assert np.mean(depths[-500:]) < 0.1
    depths, *_ = World(0.9).run(policy, 1500)
    assert np.median(depths[-100:]) >= 4
    depths, *_ = World(0.0).run(policy, 1000)
    assert np.mean(depths[-500:]) < 0.1


def test_another_number_of_rows_starts_from_what_is_known() -> None:
    world, policy = World(0.8, lambda rows, depth: 1 + (0.05 if rows < 4 else 1.0) * depth), ThroughputPolicy()
    world.run(policy, 400, rows=2)
    assert world.run(policy, 1, rows=3)[0][0] >= 4
    assert world.run(policy, 400, rows=8)[0][-100:].count(0) >= 90
    assert world.run(policy, 40, rows=2)[0].count(0) <= 4


@pytest.mark.parametrize("seed", in_full(range(3), range(1)))
@pytest.mark.parametrize("slope", [0.05, 0.1, 0.2])
def test_chains_end_where_the_head_is_not_sure(slope: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    moods, policy = Moods(0.95, lambda rows, depth: 1 + slope * depth, rng), ThroughputPolicy(8)
    moods.draft(policy, 300)
    plans, speed = moods.draft(policy, 3000)
    assert speed > 1.04 * moods.fastest(1)
    assert sum(plan.stop_below is not None for plan in plans) > 2700
    in_company, _ = moods.draft(policy, 10, rows=3)  # what is known of one row is the first guess for three
    assert sum(plan.stop_below is not None for plan in in_company) > 7


@pytest.mark.parametrize("swing", [0.0, 0.3])
def test_a_machine_whose_speed_swings_does_not_hide_what_pays(swing: float) -> None:
    speeds = []
    for seed in in_full(range(8), range(5)):
        rng = np.random.default_rng(seed)
        moods = Moods(0.9, lambda rows, depth: 1.1 + 0.11 * depth, rng, noise=0.05, hard=0.5, swing=swing)
        policy = ThroughputPolicy(8)
        moods.draft(policy, 150)
        speeds.append(moods.draft(policy, 1200)[1] / moods.fastest(1))
    assert np.mean(speeds) > 1.06
    useless = Moods(0.05, lambda rows, depth: 1 + 0.1 * depth, noise=0.05, hard=0.02, swing=swing)
    policy = ThroughputPolicy(8)
    useless.draft(policy, 150)
    assert useless.draft(policy, 1500)[1] > 0.98 / useless.cost(1, 0)


@pytest.mark.parametrize(("chance", "rows"), diagonal([0.0, 0.3, 0.6, 0.9], [1, 4, 16]))
def test_a_head_that_does_not_know_how_sure_to_be_loses_little(chance: float, rows: int) -> None:
    moods = Moods(chance, lambda rows, depth: 1 + 0.03 * rows * depth, hard=0.8 * chance, insight=0.0)
    policy = ThroughputPolicy(8)
    moods.draft(policy, 300, rows)
    _, speed = moods.draft(policy, 3000, rows)
    assert speed > 0.95 * moods.fastest(rows)
    assert speed > 0.97 * rows / moods.cost(rows, 0)


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.8])
def test_looks_that_come_too_dear_are_not_taken(chance: float) -> None:
    speeds = []
    for seed in in_full(range(8), range(4)):
        moods = Moods(chance, rng=np.random.default_rng(seed), hard=chance / 2, waiting=0.25)
        policy = ThroughputPolicy(8)
        moods.draft(policy, 300)
        plans, speed = moods.draft(policy, 2000)
        speeds.append(speed / moods.fastest(1, most=CONFIDENCE_LAG + 1))
        assert sum(plan.stop_below is not None for plan in plans) < 200
    assert np.mean(speeds) > 0.94


@pytest.mark.parametrize("rows", [4, 8])
def test_a_plan_is_judged_by_rounds_of_it_in_a_row(rows: int) -> None:
    speeds = []
    for seed in in_full(range(12), range(6)):
        moods = Moods(
            0.9,
            lambda rows, depth: 1 + (0.1 + (0.055 + 0.01 * rows) * depth if depth else 0),
            np.random.default_rng(seed),
            noise=0.08,
            hard=0.6,
            insight=0.6,
            waiting=0.1,
            swing=0.15,
            turning=0.1,
        )
        speeds.append(moods.draft(ThroughputPolicy(8), 1000, rows)[1] / moods.fastest(rows, most=CONFIDENCE_LAG + 1))
    assert np.mean(speeds) > 0.965


def test_longer_chains_than_were_tried_are_not_judged_by_what_drafting_takes_at_all() -> None:
    for seed in in_full(range(6), range(3)):
        world = World(0.8, lambda _, depth: 2 + 0.05 * depth if depth else 1.0, np.random.default_rng(seed))
        policy = ThroughputPolicy()
        world.run(policy, 300)
        _, seconds, tokens = world.run(policy, 1000)
        assert tokens / seconds > 0.9 * world.speed(1, 8)


def test_short_drafts_do_not_exit_early() -> None:
    assert ThroughputPolicy(CONFIDENCE_LAG + 1).plan(Context(1, EARLY_EXITS)).stop_below is None
    plans, _ = Moods(0.9).draft(ThroughputPolicy(CONFIDENCE_LAG + 1), 100)
    assert all(plan.stop_below is None for plan in plans)


PLANS = [*map(Plan, range(6)), *(Plan(levels_for(nodes), nodes) for nodes in (8, 12, 16, 24, 32))]


CHANCES = [(0.6, 0.9), (0.9, 0.3), (0.0, 0.0), (0.5, 0.7)]


@pytest.mark.parametrize(("slope", "chances", "rows"), diagonal([0.01, 0.05, 0.3], CHANCES, [1, 4]))
def test_throughput_policy_sizes_trees_by_what_pays(slope: float, chances: tuple[float, float], rows: int) -> None:
    (chance, gain), speeds = chances, []
    for seed in in_full(range(4), range(2)):
        forest = Forest(chance, lambda rows, nodes: 1 + slope * rows * nodes, np.random.default_rng(seed), gain=gain)
        policy = ThroughputPolicy(max_depth=5, max_nodes=32)
        assert policy.wants_trees
        forest.grow(policy, 600, rows)
        speeds.append(forest.grow(policy, 2000, rows)[1])
    best = max(rows * forest.expected(plan) / forest.cost(rows, plan.size) for plan in PLANS)
    assert np.mean(speeds) > 0.93 * best
    assert min(speeds) > 0.97 * rows / forest.cost(rows, 0)


def test_plain_decoding_is_seldom_looked_at_where_trees_are_far_ahead_of_it() -> None:
    plain = 0
    for seed in range(6):
        forest = Forest(0.0, lambda rows, nodes: 1 + 0.01 * nodes, np.random.default_rng(seed), gain=0.9)
        policy = ThroughputPolicy(5, max_nodes=32)
        forest.grow(policy, 400)
        plans, _ = forest.grow(policy, 1000)
        plain += plans.count(PLAIN)
    assert plain < 0.02 * 6 * 1000


def test_rounds_that_are_cut_because_rows_end_are_learned_from_and_begin_no_look() -> None:
    forest, policy = Forest(0.5, lambda rows, nodes: 1 + 0.01 * nodes, gain=0.9), ThroughputPolicy(5, max_nodes=32)
    forest.grow(policy, 300)
    trees = Abilities(trees=True)
    wanted = policy.plan(Context(1, trees))
    assert wanted.is_tree
    for most in (3, 2, 3, 1):
        for asked in (wanted, policy.plan(Context(1, trees))):
            cut = asked.cut(most)
            policy.observe(result(cut, [cut.depth], [1], 1 + 0.01 * asked.nodes, paths=[[0]]))
    chains = ThroughputPolicy(8)
    World(0.9).run(chains, 400)
    short = 0
    for _ in range(20):
        cut = chains.plan(Context(1, CHAINS)).depth - 1
        chains.observe(result(Plan(cut), [cut], [cut], 1.1 + 0.1 * cut))
        short += chains.plan(Context(1, CHAINS)).depth == cut
        World(0.9).run(chains, 1)
    assert short <= 3


def test_trees_are_left_out_where_they_cannot_be_had() -> None:
    forest, policy = Forest(0.3, lambda rows, nodes: 1 + 0.01 * nodes, gain=0.9), ThroughputPolicy(max_nodes=16)
    with_trees, _ = forest.grow(policy, 300)
    assert with_trees[-1].is_tree
    without, _ = forest.grow(policy, 300, trees=False)
    assert not any(plan.is_tree for plan in without)
    assert not ThroughputPolicy().wants_trees
    assert not ThroughputPolicy(max_nodes=1).wants_trees


def test_a_policy_of_depth_zero_never_drafts() -> None:
    depths, *_ = World(0.9).run(ThroughputPolicy(max_depth=0), 100)
    assert set(depths) == {0}
