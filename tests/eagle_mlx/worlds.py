"""Simulated machines, heads and texts for policies that measure them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from eagle_mlx.plan import CONFIDENCE_LAG, MATCH, PLAIN, Abilities, Context, Plan, RoundResult, Trial
from eagle_mlx.policy import Policy
from tests.full import in_full

ASKED_TWICE = in_full(1, 9)
"""One in this number of rounds is planned twice, because planning must not change anything."""
CHAINS, EARLY_EXITS = Abilities(), Abilities(early_exit=True)

PASSAGE = 100
"""Consecutive rounds in which n-grams match, or do not. Long, because plain decoding notices a match a round late."""
TRIED = 16
"""Tokens of a trial of n-grams."""

CURVES: dict[str, list[tuple[float, float]]] = {
    "M1 and M2": [(1, 1.0), (2, 1.9)],
    "M3 Max": [(1, 1.0), (2, 1.0), (4, 1.28), (6, 2.0), (8, 2.5), (16, 3.9), (32, 3.9), (33, 7.8), (64, 7.8)],
    "M4 Pro": [(1, 1.0), (2, 1.1), (3, 1.3), (4, 1.45), (5, 1.75), (6, 2.05), (8, 2.7), (16, 5.3)],
    "M5 Max": [(1, 1.0), (4, 1.29)],
    "CPU": [(1, 1.0), (2, 1.18), (3, 1.33), (4, 1.59), (5, 1.65), (6, 1.65), (8, 1.72), (16, 1.76), (32, 2.7)],
    "steps": [(1, 1.0), (2, 1.1), (3, 1.2), (4, 1.5), (5, 1.55), (6, 2.1), (7, 2.15), (8, 2.7), (9, 2.75)],
    "a jump": [(1, 1.0), (2, 1.9), (9, 2.4)],
}
"""Tokens that a forward reads, and its time relative to one token.

The first five are published (DESIGN, platform facts). Values are interpolated linearly, and extrapolated
after the last. On M1 and M2 each token has its own kernel.
"""


@cache
def verify_seconds(curve: str, tokens: int) -> float:
    points = CURVES[curve]
    (x0, y0), (x1, y1) = points[-2:]
    if tokens >= x1:
        return y1 + (y1 - y0) / (x1 - x0) * (tokens - x1)
    return float(np.interp(tokens, *zip(*points, strict=True)))


@dataclass
class World:
    """Rounds of a target with a published cost curve, a proposer with given accuracy, and a machine with noise."""

    curve: str = "M5 Max"
    chance: float = 0.7
    """Probability that a draft token is accepted if those before it are."""
    hard: float | None = None
    """The same for every other round; None: no difference."""
    insight: float = 1.0
    """1: confidences show which rounds are hard; 0: they show nothing."""
    waiting: float = 0.03
    """Cost of reading the confidences, in plain rounds."""
    drafting: float = 0.05
    """Cost of drafting a token, in plain rounds."""
    side: float = 0.0
    """A tree's node beyond its chain adds this, divided by its rank, to the probability of one more token."""
    can: Abilities = CHAINS
    share: float = 0.0
    """Share of rounds in which n-grams can draft, at no cost."""
    apart: int = 0
    """The number of rows that never match, the first of each round."""
    ngrams: float = 0.8
    """Probability that each of their tokens is accepted."""
    there: float | None = None
    """Probability for the model's tokens in these rounds; None: as in all."""
    noise: float = 0.03
    busy: float = 1.0
    """Factor by which rounds are slower during every other 50 rounds."""
    turning: float = 0.0
    """How much longer a round takes after one of another shape, as a share."""
    compiling: int = 0
    """First rounds in which drafts take eight times as long, because kernels are compiled."""
    seed: int = 0
    rounds: int = field(default=0, init=False)
    tokens: float = field(default=0.0, init=False)
    seconds: float = field(default=0.0, init=False)
    """Seconds that an idle machine would take."""
    plans: list[Plan] = field(default_factory=list, init=False)
    _latest: dict[int, Plan] = field(default_factory=dict, init=False)
    """The latest plan of each group."""
    _ahead: dict[int, Plan] = field(default_factory=dict, init=False)
    """Plain rounds that were planned before the previous plain round was observed, as in the engine."""

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def curve_at(self, *tokens: int) -> list[tuple[int, float]]:
        """Return the cost curve that is measured at load."""
        return [(count, verify_seconds(self.curve, count)) for count in tokens]

    def run(self, policy: Policy, rounds: int, rows: int = 1, group: int = 0) -> float:
        """Decode rounds. Return tokens per second and row relative to plain decoding of these rows."""
        tokens, seconds = self.tokens, self.seconds
        for _ in range(rounds):
            self._round(policy, rows, group)
        return (self.tokens - tokens) / (self.seconds - seconds) * self.cost(rows, PLAIN, 0)

    def _round(self, policy: Policy, rows: int, group: int) -> None:
        passage = self.rounds // PASSAGE
        repeats = int((passage + 1) * self.share) > int(passage * self.share)
        matches = tuple(repeats and row >= self.apart for row in range(rows))
        sources = tuple(MATCH * match for match in matches) if any(matches) else ()
        context = Context(rows, self.can, group, sources=sources)
        ahead = self._ahead.pop(group, None)
        plan = ahead or policy.plan(context)
        assert ahead or self.rounds % ASKED_TWICE or policy.plan(context) == plan
        assert all(match or not count for match, count in zip(matches, plan.lookups, strict=False))
        lookups = [count > 0 for count in plan.lookups or [0] * rows]
        hard = [bool(self.rng.random() < 0.5) for _ in range(rows)]
        chances = [self.chance_of(*row) for row in zip(hard, matches, lookups, strict=True)]
        depth, confidences = self._drafted(plan, chances)
        depths = [depth if plan.depth or lookup else 0 for lookup in lookups]
        size = plan.nodes if plan.is_tree else depth
        seconds = self.cost(rows, plan, size) + self.waiting * len(confidences)
        right = [self._kept(TRIED, self.ngrams) if match else 0 for match in matches]
        kept = [
            min(depth, right[row]) if lookup else self._kept(depths[row], chances[row])
            for row, lookup in enumerate(lookups)
        ]
        paths = [self._path(plan, row) for row in kept] if plan.is_tree else ()
        measured = seconds * max(0.2, self.rng.normal(1, self.noise)) * (20 if self.rng.random() < 0.01 else 1)
        measured *= self.busy if self.rounds // 50 % 2 else 1
        measured *= 8 if depth and self.rounds < self.compiling else 1
        measured *= 1 + self.turning if self.plans and alike(plan) != alike(self.plans[-1]) else 1
        accepted = [len(path) for path in paths] if plan.is_tree else kept
        trials = [Trial(min(row + 1, TRIED), row) for row, match in zip(right, matches, strict=True) if match]
        if plan == PLAIN == self._latest.get(group) and (after := policy.plan(context)) == PLAIN:
            self._ahead[group] = after
        self._latest[group] = plan
        policy.observe(result(plan, depths, accepted, measured, paths, confidences, group, trials))
        self.rounds, self.seconds = self.rounds + 1, self.seconds + seconds
        self.tokens += sum(map(self.expected, [plan] * rows, depths, chances)) / rows
        self.plans.append(plan)

    def _drafted(self, plan: Plan, chances: Sequence[float]) -> tuple[int, list[list[float]]]:
        """Return the depth that a plan drafts, and the confidences that it reads."""
        depth, confidences = plan.size if plan.lookups else plan.depth, list[list[float]]()
        if plan.stop_below is not None:
            mean = (self.chance + (self.chance if self.hard is None else self.hard)) / 2
            claimed = [mean + self.insight * (chance - mean) for chance in chances]
            depth = min(CONFIDENCE_LAG + 1, plan.depth)
            while depth < plan.depth:
                confidences.append([claim ** (len(confidences) + 1) for claim in claimed])
                if sum(confidences[-1]) < plan.stop_below * len(chances):
                    break
                depth += 1
        return depth, confidences

    def _kept(self, depth: int, chance: float) -> int:
        return next((at for at, drawn in enumerate(self.rng.random(depth).tolist()) if drawn >= chance), depth)

    def _path(self, plan: Plan, kept: int) -> list[int]:
        """Return the ranks of accepted nodes. The chain has the first ranks of a tree."""
        others = range(plan.depth, plan.nodes)
        return [*range(min(kept, plan.depth)), *(rank for rank in others if self.rng.random() < self.side / (rank + 1))]

    def chance_of(self, is_hard: bool | int, repeats: bool, lookup: bool) -> float:
        if lookup:
            return self.ngrams
        if repeats and self.there is not None:
            return self.there
        return self.hard if is_hard and self.hard is not None else self.chance

    def expected(self, plan: Plan, depth: int, chance: float) -> float:
        """Return the expected tokens of a row."""
        chain = sum(chance**i for i in range(depth + 1))
        return chain + (sum(self.side / (rank + 1) for rank in range(plan.depth, plan.nodes)) if plan.is_tree else 0.0)

    def cost(self, rows: int, plan: Plan, size: int) -> float:
        levels = plan.depth if plan.is_tree or not plan.depth else size
        return verify_seconds(self.curve, rows * (size + 1)) + self.drafting * levels

    def best(self, rows: int = 1, most: int = 8, trees: Sequence[Plan] = ()) -> float:
        """Return the speed of the best fixed arm, or of the best for each kind of round, relative to plain decoding."""
        here = [PLAIN, *map(Plan, range(1, most + 1)), *trees]
        there, own = list(here), (0,) * self.apart
        for depth in range(1, 2 * most + 1):
            there.append(Plan(0, lookups=(*own, *(depth,) * (rows - self.apart))))
            if own and depth <= most:
                there.append(replace(there[-1], depth=depth))
        places = [(self._best(rows, here, False), 1 - self.share), (self._best(rows, there, True), self.share)]
        tokens, seconds = (sum(share * place[i] for place, share in places) for i in (0, 1))
        return tokens / seconds * self.cost(rows, PLAIN, 0)

    def _best(self, rows: int, plans: Sequence[Plan], repeats: bool) -> tuple[float, float]:
        """Return a row's tokens and the seconds of the fastest plan."""
        candidates = []
        for plan in plans:
            tokens = 0.0
            for row in range(rows):
                match, lookup = repeats and row >= self.apart, any(plan.lookups[row : row + 1])
                depth = plan.size if lookup else plan.depth
                tokens += sum(self.expected(plan, depth, self.chance_of(hard, match, lookup)) / 2 for hard in (0, 1))
            candidates.append((tokens / rows, self.cost(rows, plan, plan.size)))
        return max(candidates, key=lambda place: place[0] / place[1])


def alike(plan: Plan) -> tuple[int, int, bool]:
    """Return a plan's depth and nodes, and whether it may exit early, at any threshold."""
    return plan.depth, plan.nodes, plan.stop_below is not None


def result(
    plan: Plan,
    drafted: Sequence[int],
    accepted: Sequence[int],
    seconds: float,
    paths: Sequence[Sequence[int]] = (),
    confidences: Sequence[Sequence[float]] = (),
    group: int = 0,
    trials: Sequence[Trial] = (),
) -> RoundResult:
    """Return a round of rows that continue."""
    taken = [kept + 1 for kept in accepted]
    return RoundResult(plan, drafted, accepted, taken, seconds, None, paths, confidences, group, trials)
