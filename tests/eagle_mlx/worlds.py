"""Simulated costs and acceptance for policies that measure both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from eagle_mlx.policy import Outcome, Policy, Shape, ThroughputPolicy
from eagle_mlx.policy.base import BEHIND

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
    """How many of the tokens that a chain gets wrong are right beside it, at two nodes a level."""
    node: float = 0.1
    """Seconds of a token beside an elastic chain, for each row."""
    flanked: int = 0
    """Rounds with tokens beside elastic chains."""

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
            depth, asked, chances, beside = shape.depth, 0, list[list[float]](), 0
            if shape.elastic:
                limits, depth = policy.limits(rows, trees), min(BEHIND + 1, shape.depth)
                while depth < shape.depth:
                    asked += 1
                    chances.append([claim**asked for claim in claimed])
                    if limits.enough(chances[-1]):
                        break
                    depth += 1
                beside = limits.beside(depth, chances) if limits.beside else 0
                assert trees or not beside
            self.flanked += beside > 0
            crowd = shape.nodes / depth if shape.is_tree else 1.0
            wide = min(1.0, crowd - 1) * self.beside
            kept = [int(np.cumprod(self.rng.random(depth) < c + (1 - c) * wide).sum()) for c in truth]
            aside = (
                [self.sibling(claim, depth, count, beside) for claim, count in zip(claimed, kept, strict=True)]
                if beside
                else []
            )
            seconds = self.cost(rows, shape.nodes if shape.is_tree else depth) + self.waiting * asked
            seconds += self.node * rows * beside
            seconds *= 1 + self.turning if shapes and shape != shapes[-1] else 1
            measured = seconds * max(0.2, self.rng.normal(1, self.noise)) * (20 if self.rng.random() < 0.01 else 1)
            if self.swing:
                self.weather = 0.99 * self.weather + self.swing * math.sqrt(1 - 0.99**2) * self.rng.normal()
                measured *= math.exp(self.weather)
            if shape.is_tree:
                policy.observe_tree(shape, [[int(level * crowd) for level in range(count)] for count in kept], measured)
            elif shape.elastic:
                policy.observe_elastic(Outcome(chances, [depth] * rows, kept, beside, aside), measured)
                tokens += sum(number is not None for number in aside)
            else:
                policy.observe(depth, [depth] * rows, kept, measured)
            shapes.append(shape)
            clock, tokens = clock + seconds, tokens + rows + sum(kept)
        return shapes, tokens / clock

    def sibling(self, claim: float, depth: int, kept: int, count: int) -> int | None:
        """Which of `count` tokens beside a chain is right that failed behind `kept` of its `depth`."""
        if kept == depth or not count:
            return None
        doubts = [
            (claim**place * (1 - claim) * 0.5**number, place, number) for place in range(depth) for number in (1, 2)
        ]
        ranks = [(place, number) for _, place, number in sorted(doubts, reverse=True)][:count]
        right = self.rng.random()
        number = 1 if right < self.beside else 2 if right < 1.4 * self.beside else 3
        return ranks.index((kept, number)) if (kept, number) in ranks else None

    def fastest(self, rows: int, most: int = 8) -> float:
        """Tokens per second of the best fixed depth up to `most`."""
        expected = [sum((self.chance**i + self.hard**i) / 2 for i in range(depth + 1)) for depth in range(most + 1)]
        return max(rows * tokens / self.cost(rows, depth) for depth, tokens in enumerate(expected))


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
