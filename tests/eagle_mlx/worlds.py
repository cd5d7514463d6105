"""Simulated costs and acceptance for policies that measure both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from eagle_mlx.plan import CONFIDENCE_LAG, Abilities, Context, Plan, RoundResult
from eagle_mlx.policy import Policy, ThroughputPolicy
from tests.full import in_full

ASKED_TWICE = in_full(1, 9)
"""Of so many rounds one is planned twice: asking changes nothing."""
Cost = Callable[[int, int], float]
CHAINS, EARLY_EXITS = Abilities(), Abilities(early_exit=True)


@dataclass
class World:
    """Rounds whose drafts are kept with one chance per position, and that take the seconds of a formula."""

    chance: float
    cost: Cost = lambda rows, depth: 1 + 0.1 * depth + (0.1 if depth else 0)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    noise: float = 0.02
    busy: float = 1.0
    """How much longer rounds take during every other 50 of them."""
    compiling: int = 0
    """Rounds at first in which drafts take eight times as long, as where kernels are compiled for them."""
    rounds: int = 0
    asked: int = 0
    """How often a policy was asked for a plan."""

    def run(self, policy: Policy, rounds: int, rows: int = 1) -> tuple[list[int], float, int]:
        """The depths chosen, and the seconds and tokens of it all."""
        depths, clock, tokens = [], 0.0, 0
        for _ in range(rounds):
            plan = self.planned(policy, rows, CHAINS)
            depth = plan.depth
            kept = [self.kept(depth, self.chance) for _ in range(rows)]
            seconds = self.cost(rows, depth) * max(0.2, self.rng.normal(1, self.noise))
            seconds *= 20 if self.rng.random() < 0.01 else 1  # something else had the machine
            seconds *= self.busy if self.rounds // 50 % 2 else 1
            seconds *= 8 if depth and self.rounds < self.compiling else 1
            self.rounds += 1
            policy.observe(result(plan, [depth] * rows, kept, seconds))
            depths.append(depth)
            clock += self.cost(rows, depth)
            tokens += rows + sum(kept)
        return depths, clock, tokens

    def planned(self, policy: Policy, rows: int, can: Abilities) -> Plan:
        """What the policy plans, however often it is asked."""
        plan = policy.plan(Context(rows, can))
        self.asked += 1
        assert self.asked % ASKED_TWICE or policy.plan(Context(rows, can)) == plan
        return plan

    def kept(self, depth: int, chance: float) -> int:
        """How many of so many draft tokens are kept."""
        return next((at for at, drawn in enumerate(self.rng.random(depth).tolist()) if drawn >= chance), depth)

    def best(self, rows: int, most: int) -> int:
        return max(range(most + 1), key=lambda d: sum(self.chance**i for i in range(d + 1)) / self.cost(rows, d))

    def speed(self, rows: int, *depths: int) -> float:
        """Tokens per second to be expected of rounds of these depths."""
        tokens = sum(self.chance**i for depth in depths for i in range(depth + 1))
        return rows * tokens / sum(self.cost(rows, depth) for depth in depths)


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

    def draft(self, policy: ThroughputPolicy, rounds: int, rows: int = 1) -> tuple[list[Plan], float]:
        """The plans chosen, and the tokens per second."""
        plans: list[Plan] = []
        clock, tokens = 0.0, 0
        for _ in range(rounds):
            plan = self.planned(policy, rows, EARLY_EXITS)
            truth = [self.chance if self.rng.random() < 0.5 else self.hard for _ in range(rows)]
            middle = (self.chance + self.hard) / 2
            claimed = [middle + self.insight * (chance - middle) for chance in truth]
            depth, confidences = plan.depth, list[list[float]]()
            if plan.stop_below is not None:
                depth = min(CONFIDENCE_LAG + 1, plan.depth)
                while depth < plan.depth:
                    confidences.append([claim ** (len(confidences) + 1) for claim in claimed])
                    if sum(confidences[-1]) < plan.stop_below * rows:
                        break
                    depth += 1
            kept = [self.kept(depth, chance) for chance in truth]
            seconds = self.cost(rows, depth) + self.waiting * len(confidences)
            seconds *= 1 + self.turning if plans and alike(plan) != alike(plans[-1]) else 1
            measured = seconds * max(0.2, self.rng.normal(1, self.noise)) * (20 if self.rng.random() < 0.01 else 1)
            if self.swing:
                self.weather = 0.99 * self.weather + self.swing * math.sqrt(1 - 0.99**2) * self.rng.normal()
                measured *= math.exp(self.weather)
            policy.observe(result(plan, [depth] * rows, kept, measured, confidences=confidences))
            plans.append(plan)
            clock, tokens = clock + seconds, tokens + rows + sum(kept)
        return plans, tokens / clock

    def fastest(self, rows: int, most: int = 8) -> float:
        """Tokens per second of the best fixed depth up to `most`."""
        expected = [sum((self.chance**i + self.hard**i) / 2 for i in range(depth + 1)) for depth in range(most + 1)]
        return max(rows * tokens / self.cost(rows, depth) for depth, tokens in enumerate(expected))


@dataclass
class Forest(World):
    """The same where a tree of n tokens adds, with its i-th, the chance `gain / (i + 1)` of one more."""

    gain: float = 0.5

    def expected(self, plan: Plan) -> float:
        if not plan.is_tree:
            return sum(self.chance**i for i in range(plan.depth + 1))
        return 1 + sum(self.gain / (i + 1) for i in range(plan.nodes))

    def grow(self, policy: Policy, rounds: int, rows: int = 1, trees: bool = True) -> tuple[list[Plan], float]:
        """The plans chosen, and the tokens per second."""
        plans, clock, tokens = [], 0.0, 0.0
        for _ in range(rounds):
            plan = self.planned(policy, rows, Abilities(trees=trees))
            seconds = self.cost(rows, plan.size)
            measured = seconds * max(0.2, self.rng.normal(1, self.noise))
            if plan.is_tree:
                kept = [[i for i in range(plan.nodes) if self.rng.random() < self.gain / (i + 1)] for _ in range(rows)]
                accepted = [len(path) for path in kept]
                policy.observe(result(plan, [plan.depth] * rows, accepted, measured, paths=kept))
            else:
                depth = plan.depth
                accepted = [self.kept(depth, self.chance) for _ in range(rows)]
                policy.observe(result(plan, [depth] * rows, accepted, measured))
            plans.append(plan)
            clock, tokens = clock + seconds, tokens + rows * self.expected(plan)
        return plans, tokens / clock


@dataclass
class Repeating(World):
    """The same where a share of all rounds can be drafted by n-grams, which cost nothing, or by a model."""

    share: float = 0.3
    ngrams: float = 0.8
    """The chance of each of their tokens; that of the model's is `chance`."""
    there: float | None = None
    """That of the model's where n-grams could draft too; by default as everywhere."""
    draft: float = 0.05
    """What a draft token of the model costs."""

    def seconds(self, depth: int, lookup: bool) -> float:
        return self.cost(1, depth) + (0 if lookup else self.draft * depth)

    def decode(self, policy: ThroughputPolicy, rounds: int = 3000) -> float:
        """Tokens per second."""
        clock, tokens = 0.0, 0
        for _ in range(rounds):
            repeats = bool(self.rng.random() < self.share)
            plan = self.planned(policy, 1, Abilities(lookup=repeats))
            assert not plan.lookup or repeats
            kept = self.kept(plan.depth, self.chance_of(repeats, bool(plan.lookup)))
            seconds = self.seconds(plan.depth, bool(plan.lookup))
            measured = seconds * max(0.2, self.rng.normal(1, self.noise)) * (20 if self.rng.random() < 0.01 else 1)
            policy.observe(result(plan, [plan.depth], [kept], measured))
            clock, tokens = clock + seconds, tokens + 1 + kept
        return tokens / clock

    def chance_of(self, repeats: bool, lookup: bool) -> float:
        if lookup:
            return self.ngrams
        return self.there if repeats and self.there is not None else self.chance

    def fastest(self, most: int = 8) -> float:
        """Tokens per second of the best fixed choice: who drafts where n-grams could, and how deep either drafts."""
        depths = range(most + 1)
        return max(
            self.speed_of(
                (1 - self.share, False, False, model), (self.share, True, lookup, ngrams if lookup else model)
            )
            for model, lookup, ngrams in product(depths, (True, False), depths)
        )

    def speed_of(self, *places: tuple[float, bool, bool, int]) -> float:
        tokens = sum(
            share * sum(self.chance_of(repeats, lookup) ** i for i in range(depth + 1))
            for share, repeats, lookup, depth in places
        )
        return tokens / sum(share * self.seconds(depth, lookup) for share, _, lookup, depth in places)


def alike(plan: Plan) -> tuple[int, int, bool]:
    """What a plan drafts, wherever its chain ends."""
    return plan.depth, plan.nodes, plan.stop_below is not None


def result(
    plan: Plan,
    drafted: Sequence[int],
    accepted: Sequence[int],
    seconds: float,
    paths: Sequence[Sequence[int]] = (),
    confidences: Sequence[Sequence[float]] = (),
) -> RoundResult:
    """A round of rows that go on."""
    return RoundResult(
        plan, drafted, accepted, [kept + 1 for kept in accepted], seconds, paths=paths, confidences=confidences
    )
