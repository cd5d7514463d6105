"""N-grams or a model: what `HybridPolicy` chooses is as fast as the best fixed choice."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest

from eagle_mlx.plan import PLAIN, Abilities
from eagle_mlx.policy import HybridPolicy, ThroughputPolicy
from tests.eagle_mlx.worlds import World, result
from tests.full import in_full

ROUNDS = 3000


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

    def decode(self, policy: ThroughputPolicy, rounds: int = ROUNDS) -> float:
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


WORLDS: dict[str, dict[str, Any]] = {
    "both pay": {"chance": 0.5},
    "the model is better everywhere": {"chance": 0.8, "ngrams": 0.4},
    "n-grams are never right": {"chance": 0.6, "ngrams": 0.0},
    "the model is never right": {"chance": 0.0, "ngrams": 0.8},
    "neither is ever right": {"chance": 0.0, "ngrams": 0.0},
    "the model is better where texts repeat": {"chance": 0.4, "ngrams": 0.5, "there": 0.9},
    "the model drafts slowly": {"chance": 0.6, "ngrams": 0.6, "draft": 0.3},
    "texts repeat always": {"chance": 0.5, "ngrams": 0.9, "share": 1.0},
    "texts never repeat": {"chance": 0.5, "share": 0.0},
}


def share_of(world: str, of: Callable[[Repeating], float]) -> tuple[float, float]:
    """What the policy reaches of something else in such worlds: the mean and the least."""
    shares = []
    for seed in range(in_full(12, 3)):
        made = Repeating(rng=np.random.default_rng(seed), **WORLDS[world])
        reached = made.decode(HybridPolicy())
        shares.append(reached / of(Repeating(rng=np.random.default_rng(seed), **WORLDS[world])))
    return float(np.mean(shares)), min(shares)


@pytest.mark.parametrize("world", [world for world in WORLDS if "there" not in WORLDS[world]])
def test_the_faster_way_drafts(world: str) -> None:
    mean, least = share_of(world, Repeating.fastest)
    assert mean > 0.94
    assert least > 0.9


@pytest.mark.parametrize("world", WORLDS)
def test_n_grams_beside_a_model_slow_nothing_down(world: str) -> None:
    mean, least = share_of(world, lambda made: made.decode(ThroughputPolicy()))
    assert mean > 0.985
    assert least > 0.97


def test_where_nothing_pays_all_rounds_but_a_few_are_plain() -> None:
    world = Repeating(chance=0.0, ngrams=0.0)
    assert world.decode(HybridPolicy()) > 0.975 * world.speed_of((1.0, False, False, 0))


def test_without_n_grams_it_plans_what_the_other_plans() -> None:
    one, other = Repeating(chance=0.6, share=0.0), Repeating(chance=0.6, share=0.0)
    assert one.decode(HybridPolicy()) == other.decode(ThroughputPolicy())


def test_what_it_learnt_is_where_the_next_begins() -> None:
    policy, world = HybridPolicy(), Repeating(chance=0.8, ngrams=0.3)
    world.decode(policy)
    following = HybridPolicy()
    following.start_from(json.loads(json.dumps(policy.knowledge())))
    assert following._contest(1).saved() == policy._contest(1).saved()
    assert world.decode(following, 400) > 0.9 * world.fastest()


def test_a_twin_learns_from_the_other_group() -> None:
    policy, world = HybridPolicy(), Repeating(chance=0.2, ngrams=0.9)
    twin = policy.twin()
    world.decode(policy)
    plans = {twin.plan(1, Abilities(lookup=True)) for _ in range(3)}
    assert plans != {PLAIN}
    assert all(plan.lookup for plan in plans)
