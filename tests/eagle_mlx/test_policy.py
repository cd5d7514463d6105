"""How many tokens to draft: against simulated costs and acceptance, without a clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from eagle_mlx.errors import ConfigError
from eagle_mlx.policy import AcceptancePolicy, FixedPolicy, Policy, Shape, ShapePolicy, ThroughputPolicy
from eagle_mlx.policy.base import BEHIND
from eagle_mlx.policy.costs import Costs, slope
from eagle_mlx.policy.swings import Swings
from eagle_mlx.policy.throughput import levels_for

Cost = Callable[[int, int], float]


@dataclass
class World:
    """Rounds whose drafts are kept with one chance per position, and that take the seconds of a formula."""

    chance: float
    cost: Cost = lambda rows, depth: 1 + 0.1 * depth + (0.1 if depth else 0)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    noise: float = 0.02
    busy: float = 1.0
    """How much longer rounds take during every other 50 of them."""
    rounds: int = 0

    def run(self, policy: Policy, rounds: int, rows: int = 1) -> tuple[list[int], float, int]:
        """The depths chosen, and the seconds and tokens of it all."""
        depths, clock, tokens = [], 0.0, 0
        for _ in range(rounds):
            depth = policy.depth(rows)
            assert policy.depth(rows) == depth  # asking changes nothing
            kept = [int(np.cumprod(self.rng.random(depth) < self.chance).sum()) for _ in range(rows)]
            seconds = self.cost(rows, depth) * max(0.2, self.rng.normal(1, self.noise))
            seconds *= 20 if self.rng.random() < 0.01 else 1  # something else had the machine
            seconds *= self.busy if self.rounds // 50 % 2 else 1
            self.rounds += 1
            policy.observe(depth, [depth] * rows, kept, seconds)
            depths.append(depth)
            clock += self.cost(rows, depth)
            tokens += rows + sum(kept)
        return depths, clock, tokens

    def best(self, rows: int, most: int) -> int:
        return max(range(most + 1), key=lambda d: sum(self.chance**i for i in range(d + 1)) / self.cost(rows, d))

    def speed(self, rows: int, *depths: int) -> float:
        """Tokens per second to be expected of rounds of these depths."""
        tokens = sum(self.chance**i for depth in depths for i in range(depth + 1))
        return rows * tokens / sum(self.cost(rows, depth) for depth in depths)


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


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize(
    "cost",
    [
        lambda rows, depth: 1 + 0.1 * depth + (0.1 if depth else 0),
        lambda rows, depth: 1 + 0.02 * depth,
        lambda rows, depth: (1, 1.9, 2.0, 2.1, 2.2, 2.3)[depth],  # as with 4 bits on a GPU: two tokens cost much more
        lambda rows, depth: 1 + 0.06 * rows * depth,
    ],
)
def test_throughput_policy_converges_to_the_best_depth(cost: Cost, chance: float, rows: int) -> None:
    world, policy = World(chance, cost), ThroughputPolicy(max_depth=5)
    world.run(policy, 400, rows)
    depths, *_ = world.run(policy, 2000, rows)
    speed, best, plain = (world.speed(rows, *d) for d in (depths, [world.best(rows, 5)], [0]))
    assert speed > (0.95 if best > 1.1 * plain else 0.9) * best  # close races are left to plain decoding
    assert speed > 0.97 * plain


@pytest.mark.parametrize("excess", [0.1, 0.5, 3.0])
def test_a_useless_proposer_costs_less_than_three_percent(excess: float) -> None:
    world, policy = World(0.0, lambda rows, depth: 1 + excess * depth), ThroughputPolicy()
    depths, seconds, tokens = world.run(policy, 3000)
    assert seconds / tokens < 1.03
    assert depths[-100:].count(0) >= 95
    assert any(depths[-1000:])  # it still looks


@pytest.mark.parametrize("noise", [0.02, 0.3])
@pytest.mark.parametrize("busy", [1.0, 5.0])
def test_a_machine_with_other_work_does_not_mislead_it_for_long(noise: float, busy: float) -> None:
    useless, policy = World(0.0, noise=noise, busy=busy), ThroughputPolicy()
    _, seconds, tokens = useless.run(policy, 3000)
    assert seconds / tokens < 1.03
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
        if policy.depth(1) == 0:
            policy.observe(0, [0], [0], 1.5)
    depths, *_ = world.run(policy, 200)
    assert sum(map(bool, depths)) < 100


def test_drafting_comes_back_when_acceptance_does() -> None:
    policy = ThroughputPolicy()
    depths, *_ = World(0.0).run(policy, 1000)
    assert set(depths[-31:]) <= {0, 1}
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


@dataclass
class Moods(World):
    """The same where whole rounds are easy or hard, and the proposer has an idea of which they are."""

    hard: float = 0.2
    """The chance of a position in every other round."""
    insight: float = 1.0
    """1: it knows which rounds are hard; 0: it has no idea."""
    waiting: float = 0.0
    """Seconds that each question costs."""
    swing: float = 0.0
    """How far the machine's speed wanders within a hundred rounds: the standard deviation of its logarithm."""
    weather: float = 0.0
    """That logarithm."""
    turning: float = 0.0
    """How much longer a round takes behind one of another shape, as a share."""
    beside: float = 0.0
    """Of a tree, how many of the tokens that a chain gets wrong are right beside it, at two nodes a level."""

    def draft(
        self, policy: ThroughputPolicy, rounds: int, rows: int = 1, trees: bool = False
    ) -> tuple[list[Shape], float]:
        """The shapes chosen, and the tokens per second."""
        shapes: list[Shape] = []
        clock, tokens = 0.0, 0
        for _ in range(rounds):
            shape = policy.shape(rows, trees, elastic=True)
            assert policy.shape(rows, trees, elastic=True) == shape  # asking changes nothing
            truth = [self.chance if self.rng.random() < 0.5 else self.hard for _ in range(rows)]
            middle = (self.chance + self.hard) / 2
            claimed = [middle + self.insight * (chance - middle) for chance in truth]
            depth, asked, chances = shape.depth, 0, []
            if shape.elastic:
                enough, depth = policy.enough(rows), min(BEHIND + 1, shape.depth)
                while depth < shape.depth:
                    asked += 1
                    chances.append([claim**asked for claim in claimed])
                    if enough(chances[-1]):
                        break
                    depth += 1
            crowd = shape.nodes / depth if shape.is_tree else 1.0
            wide = min(1.0, crowd - 1) * self.beside
            kept = [int(np.cumprod(self.rng.random(depth) < c + (1 - c) * wide).sum()) for c in truth]
            seconds = self.cost(rows, shape.nodes if shape.is_tree else depth) + self.waiting * asked
            seconds *= 1 + self.turning if shapes and shape != shapes[-1] else 1
            measured = seconds * max(0.2, self.rng.normal(1, self.noise)) * (20 if self.rng.random() < 0.01 else 1)
            if self.swing:
                self.weather = 0.99 * self.weather + self.swing * math.sqrt(1 - 0.99**2) * self.rng.normal()
                measured *= math.exp(self.weather)
            if shape.is_tree:
                policy.observe_tree(shape, [[int(level * crowd) for level in range(count)] for count in kept], measured)
            elif shape.elastic:
                policy.observe_elastic(chances, [depth] * rows, kept, measured)
            else:
                policy.observe(depth, [depth] * rows, kept, measured)
            shapes.append(shape)
            clock, tokens = clock + seconds, tokens + rows + sum(kept)
        return shapes, tokens / clock

    def fastest(self, rows: int, most: int = 8) -> float:
        """Tokens per second of the best fixed depth up to `most`."""
        expected = [sum((self.chance**i + self.hard**i) / 2 for i in range(depth + 1)) for depth in range(most + 1)]
        return max(rows * tokens / self.cost(rows, depth) for depth, tokens in enumerate(expected))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slope", [0.05, 0.1, 0.2])
def test_chains_end_where_the_head_is_not_sure(slope: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    moods, policy = Moods(0.95, lambda rows, depth: 1 + slope * depth, rng), ThroughputPolicy(8)
    moods.draft(policy, 300)
    shapes, speed = moods.draft(policy, 3000)
    assert speed > 1.04 * moods.fastest(1)
    assert sum(shape.elastic for shape in shapes) > 2700
    in_company, _ = moods.draft(policy, 10, rows=3)
    assert sum(shape.elastic for shape in in_company) > 6  # what is known of one row is the first guess for three


@pytest.mark.parametrize("rows", [1, 4])
def test_trees_that_do_not_pay_cost_elastic_chains_little(rows: int) -> None:
    shares, tried = [], 0
    for seed in range(20):
        speeds = []
        for most in (0, 16):
            rng = np.random.default_rng(seed)
            moods = Moods(0.92, lambda rows, nodes: 1.1 + 0.1 * rows * nodes, rng, noise=0.08, hard=0.5, beside=0.3)
            shapes, speed = moods.draft(ThroughputPolicy(8, max_nodes=most), 130, rows, trees=True)
            speeds.append(speed)
            tried += sum(shape.is_tree for shape in shapes)
        shares.append(speeds[1] / speeds[0])
    assert np.mean(shares) > 0.985
    assert tried > 20, "they are looked at"


def test_trees_that_pay_are_drafted_beside_elastic_chains() -> None:
    moods = Moods(0.8, lambda rows, nodes: 1.1 + 0.01 * nodes, noise=0.05, hard=0.5, beside=0.6)
    policy = ThroughputPolicy(8, max_nodes=16)
    moods.draft(policy, 400, trees=True)
    shapes, _ = moods.draft(policy, 600, trees=True)
    assert sum(shape.is_tree for shape in shapes) > 500


@pytest.mark.parametrize("swing", [0.0, 0.3])
def test_a_machine_whose_speed_swings_does_not_hide_what_pays(swing: float) -> None:
    speeds = []
    for seed in range(8):
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


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.9])
def test_a_head_that_does_not_know_how_sure_to_be_loses_little(chance: float, rows: int) -> None:
    moods = Moods(chance, lambda rows, depth: 1 + 0.03 * rows * depth, hard=0.8 * chance, insight=0.0)
    policy = ThroughputPolicy(8)
    moods.draft(policy, 300, rows)
    _, speed = moods.draft(policy, 3000, rows)
    assert speed > 0.95 * moods.fastest(rows)
    assert speed > 0.97 * rows / moods.cost(rows, 0)


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.8])
def test_questions_that_come_too_dear_are_not_asked(chance: float) -> None:
    speeds = []
    for seed in range(8):
        moods = Moods(chance, rng=np.random.default_rng(seed), hard=chance / 2, waiting=0.25)
        policy = ThroughputPolicy(8)
        moods.draft(policy, 300)
        shapes, speed = moods.draft(policy, 2000)
        speeds.append(speed / moods.fastest(1, most=BEHIND + 1))
        assert sum(shape.elastic for shape in shapes) < 200
    assert np.mean(speeds) > 0.94


@pytest.mark.parametrize("rows", [4, 8])
def test_a_shape_is_judged_by_rounds_of_it_in_a_row(rows: int) -> None:
    speeds = []
    for seed in range(12):
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
        speeds.append(moods.draft(ThroughputPolicy(8), 1000, rows)[1] / moods.fastest(rows, most=BEHIND + 1))
    assert np.mean(speeds) > 0.965


def test_longer_chains_than_were_tried_are_not_judged_by_what_drafting_takes_at_all() -> None:
    for seed in range(6):
        world = World(0.8, lambda _, depth: 2 + 0.05 * depth if depth else 1.0, np.random.default_rng(seed))
        policy = ThroughputPolicy()
        world.run(policy, 300)
        _, seconds, tokens = world.run(policy, 1000)
        assert tokens / seconds > 0.9 * world.speed(1, 8)


def test_short_drafts_are_not_asked_about() -> None:
    assert not ThroughputPolicy(BEHIND + 1).shape(1, trees=False, elastic=True).elastic
    shapes, _ = Moods(0.9).draft(ThroughputPolicy(BEHIND + 1), 100)
    assert not any(shape.elastic for shape in shapes)
    assert Shape(8, 8, elastic=True).cut(5) == Shape(5, 5, elastic=True)
    assert Shape(8, 8, elastic=True).cut(0) == Shape.chain(0)


@dataclass
class Forest(World):
    """The same where a tree of n tokens adds, with its i-th, the chance `gain / (i + 1)` of one more."""

    gain: float = 0.5

    def expected(self, shape: Shape) -> float:
        if not shape.is_tree:
            return sum(self.chance**i for i in range(shape.depth + 1))
        return 1 + sum(self.gain / (i + 1) for i in range(shape.nodes))

    def grow(
        self, policy: ThroughputPolicy, rounds: int, rows: int = 1, trees: bool = True
    ) -> tuple[list[Shape], float]:
        """The shapes chosen, and the tokens per second."""
        shapes, clock, tokens = [], 0.0, 0.0
        for _ in range(rounds):
            shape = policy.shape(rows, trees)
            assert policy.shape(rows, trees) == shape  # asking changes nothing
            seconds = self.cost(rows, shape.nodes)
            measured = seconds * max(0.2, self.rng.normal(1, self.noise))
            if shape.is_tree:
                kept = [[i for i in range(shape.nodes) if self.rng.random() < self.gain / (i + 1)] for _ in range(rows)]
                policy.observe_tree(shape, kept, measured)
            else:
                depth = shape.depth
                accepted = [int(np.cumprod(self.rng.random(depth) < self.chance).sum()) for _ in range(rows)]
                policy.observe(depth, [depth] * rows, accepted, measured)
            shapes.append(shape)
            clock, tokens = clock + seconds, tokens + rows * self.expected(shape)
        return shapes, tokens / clock


SHAPES = [*map(Shape.chain, range(6)), *(Shape(levels_for(nodes), nodes) for nodes in (8, 12, 16, 24, 32))]


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("chance", "gain"), [(0.6, 0.9), (0.9, 0.3), (0.0, 0.0), (0.5, 0.7)])
@pytest.mark.parametrize("slope", [0.01, 0.05, 0.3])
def test_throughput_policy_sizes_trees_by_what_pays(slope: float, chance: float, gain: float, rows: int) -> None:
    speeds = []
    for seed in range(4):
        forest = Forest(chance, lambda rows, nodes: 1 + slope * rows * nodes, np.random.default_rng(seed), gain=gain)
        policy = ThroughputPolicy(max_depth=5, max_nodes=32)
        assert policy.wants_trees
        forest.grow(policy, 600, rows)
        speeds.append(forest.grow(policy, 2000, rows)[1])
    best = max(rows * forest.expected(shape) / forest.cost(rows, shape.nodes) for shape in SHAPES)
    assert np.mean(speeds) > 0.93 * best
    assert min(speeds) > 0.97 * rows / forest.cost(rows, 0)


def test_plain_decoding_is_seldom_looked_at_where_trees_are_far_ahead_of_it() -> None:
    plain = 0
    for seed in range(6):
        forest = Forest(0.0, lambda rows, nodes: 1 + 0.01 * nodes, np.random.default_rng(seed), gain=0.9)
        policy = ThroughputPolicy(5, max_nodes=32)
        forest.grow(policy, 400)
        shapes, _ = forest.grow(policy, 1000)
        plain += shapes.count(Shape.chain(0))
    assert plain < 0.02 * 6 * 1000


def test_trees_are_left_out_where_they_cannot_be_had() -> None:
    forest, policy = Forest(0.3, lambda rows, nodes: 1 + 0.01 * nodes, gain=0.9), ThroughputPolicy(max_nodes=16)
    with_trees, _ = forest.grow(policy, 300)
    assert with_trees[-1].is_tree
    without, _ = forest.grow(policy, 300, trees=False)
    assert not any(shape.is_tree for shape in without)
    assert not ThroughputPolicy().wants_trees
    assert not ThroughputPolicy(max_nodes=1).wants_trees


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


def test_a_policy_of_depth_zero_never_drafts() -> None:
    depths, *_ = World(0.9).run(ThroughputPolicy(max_depth=0), 100)
    assert set(depths) == {0}
