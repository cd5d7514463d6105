"""N-grams or a model: what `HybridPolicy` chooses is as fast as the best fixed choice."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from eagle_mlx.plan import PLAIN, Abilities, Context
from eagle_mlx.policy import HybridPolicy, ThroughputPolicy
from tests.eagle_mlx.worlds import Repeating
from tests.full import in_full

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
    world.decode(policy)
    plans = {policy.plan(Context(1, Abilities(lookup=True), group=1)) for _ in range(3)}
    assert plans != {PLAIN}
    assert all(plan.lookup for plan in plans)
