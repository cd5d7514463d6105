"""What an engine has learnt is where the next begins; and no file, whatever is in it, does any harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eagle_mlx as em
from eagle_mlx.engine.prior import Prior, start
from eagle_mlx.plan import Context, Plan
from eagle_mlx.policy import HybridPolicy, ThroughputPolicy
from eagle_mlx.proposers.ngram import NgramProposer
from eagle_mlx.target import Target
from tests.eagle_mlx.worlds import CHAINS, Forest, Moods, Repeating, World
from tests.fakes import tiny_head, tiny_target

PROMPTS = [[5, 6, 7, 5, 6, 7], [9, 8, 7, 6, 5]]
COSTS = {
    "line": [1.1 + 0.1 * depth if depth else 1.0 for depth in range(9)],
    "steps": [1, 1.1, 1.2, 1.5, 1.55, 2.1, 2.15, 2.7, 2.75],
}


def again(policy: ThroughputPolicy) -> ThroughputPolicy:
    """A new policy that begins with what this one knows, by way of a file."""
    second = ThroughputPolicy(policy.max_depth, max_nodes=policy.max_nodes)
    second.start_from(json.loads(json.dumps(policy.knowledge())))
    return second


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("costs", COSTS)
def test_the_first_rounds_of_a_second_engine_are_as_fast_as_those_of_the_first_became(
    costs: str, chance: float
) -> None:
    first, settled = 0.0, 0.0
    for seed in range(6):
        world = World(chance, lambda _, depth: COSTS[costs][depth], np.random.default_rng(seed))
        policy = ThroughputPolicy()
        world.run(policy, 600)
        settled += world.speed(1, *world.run(policy, 400)[0])
        first += world.speed(1, *world.run(again(policy), 20)[0])
    assert first > 0.98 * settled


def test_it_is_so_with_early_exits_and_trees() -> None:
    first, settled = 0.0, 0.0
    for seed in range(3):
        moods = Moods(0.95, lambda _, depth: 1 + 0.1 * depth, np.random.default_rng(seed), hard=0.5)
        policy = ThroughputPolicy()
        moods.draft(policy, 400)
        settled += moods.draft(policy, 600)[1]
        first += sum(moods.draft(again(policy), 20)[1] for _ in range(20)) / 20
    assert first > 0.98 * settled
    forest, policy = Forest(0.5, lambda _, nodes: 1 + 0.01 * nodes, gain=0.9), ThroughputPolicy(5, max_nodes=32)
    forest.grow(policy, 400)
    assert forest.grow(again(policy), 20)[1] > 0.98 * forest.grow(policy, 400)[1]


def test_what_led_leads_from_the_first_round_on_though_plain_decoding_is_close() -> None:
    knowledge = ThroughputPolicy(2).knowledge() | {"drafting": True}
    knowledge["estimates"] |= {"chain": [[1, 0, 1.0], [1, 1, 1.2], [1, 2, 1.6]], "positions": [[50, 0.38], [50, 0.1]]}
    knowledge["tried"] = [[depth, 0, False, 20] for depth in range(3)]
    policy = ThroughputPolicy(2)
    policy.start_from(knowledge)
    assert policy.plan(Context(1, CHAINS)) == Plan(1)


def test_without_it_the_first_rounds_are_slower() -> None:
    """So the tests above could fail."""
    first, settled = 0.0, 0.0
    for seed in range(6):
        world, policy = World(0.8, rng=np.random.default_rng(seed)), ThroughputPolicy()
        first += world.speed(1, *world.run(policy, 20)[0])
        world.run(policy, 600)
        settled += world.speed(1, *world.run(policy, 400)[0])
    assert first < 0.95 * settled


def test_what_no_longer_pays_is_soon_given_up() -> None:
    policy = ThroughputPolicy()
    World(0.9).run(policy, 400)
    second = again(policy)
    depths, seconds, tokens = World(0.0).run(second, 1000)
    assert np.mean(np.array(depths[100:]) > 0) < 0.05
    assert seconds / tokens < 1.08


def decoded(target: Target, folder: Path, rounds: int = 130, head: Any = None, context: int = 0) -> Prior:
    """The prior of an engine that has decoded so much."""
    policy = ThroughputPolicy(4)
    engine = em.Engine(target, head or NgramProposer(), policy=policy)
    prior = Prior(engine, policy, folder)
    params = em.SamplingParams(max_tokens=rounds, ignore_eos=True)
    engine.generate([[*prompt, *([3] * context)] for prompt in PROMPTS[:1]], params)
    return prior


def test_an_engine_begins_with_what_another_has_kept(tmp_path: Path) -> None:
    target = tiny_target()
    first = decoded(target, tmp_path, rounds=400)
    assert first.save()
    second = decoded(target, tmp_path, rounds=1)
    assert second.file == first.file
    kept = json.loads(first.file.read_text())["bands"]["512"]
    assert second._policy.knowledge()["estimates"]["chain"] == kept["estimates"]["chain"]
    assert len(first.file.read_bytes()) < 20_000


def test_other_parts_have_other_files(tmp_path: Path) -> None:
    target = tiny_target()
    files = [
        decoded(target, tmp_path, 1).file,
        decoded(tiny_target(seed=1), tmp_path, 1).file,
        decoded(target, tmp_path, 1, NgramProposer(2)).file,
        decoded(target, tmp_path, 1, em.HeadProposer(tiny_head(target, seed=0))).file,
        decoded(target, tmp_path, 1, em.HeadProposer(tiny_head(target, seed=1))).file,
        decoded(target, tmp_path, 1, em.DraftModelProposer(target)).file,
    ]
    assert len(set(files)) == len(files)


def test_each_band_of_context_has_its_own_part_and_the_nearest_stands_in(tmp_path: Path) -> None:
    target = tiny_target()
    target.context_length = 2048
    assert decoded(target, tmp_path, 400).save()
    long = decoded(target, tmp_path, 400, context=600)
    assert long._policy._count  # it began with the other band's
    assert long.save()
    assert set(json.loads(long.file.read_text())["bands"]) == {"512", "2048"}


def test_few_rounds_are_not_kept(tmp_path: Path) -> None:
    prior = decoded(tiny_target(), tmp_path, rounds=10)
    assert not prior.save()
    assert not prior.file.exists()


def test_a_place_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not decoded(tiny_target(), tmp_path / "file" / "folder", rounds=400).save()


@pytest.mark.parametrize("content", ["", "[]", "{", "\x00", '{"version": 1}', '{"version": 99, "bands": {"512": {}}}'])
def test_a_file_that_is_none_is_passed_over_and_replaced(tmp_path: Path, content: str) -> None:
    target = tiny_target()
    decoded(target, tmp_path, 1).file.write_text(content)
    prior = decoded(target, tmp_path, rounds=400)
    assert prior.save()
    assert json.loads(prior.file.read_text())["version"] == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=6,
)


@given(st.sampled_from([ThroughputPolicy, HybridPolicy]), st.data())
def test_knowledge_that_is_damaged_is_passed_over(kind: type[ThroughputPolicy], data: st.DataObject) -> None:
    """Whatever stands in the place of a part: the policy is a new one then, and decides as such."""
    source = kind(4)
    Repeating(0.6).decode(source, 80)
    knowledge: Any = json.loads(json.dumps(source.knowledge()))
    parts = [knowledge, knowledge["estimates"], *(row for row in knowledge.get("contests", []))]
    within, key = data.draw(
        st.sampled_from(
            [(part, key) for part in parts for key in (part if isinstance(part, dict) else range(len(part)))]
        )
    )
    within[key] = data.draw(JSON)
    policy = kind(4)
    if not start(policy, knowledge):
        assert policy.knowledge() == kind(4).knowledge()
    Repeating(0.6).decode(policy, 60)


@pytest.mark.parametrize("knowledge", [None, [], "", 3, {}])
def test_what_is_no_knowledge_is_none(knowledge: Any) -> None:
    policy = ThroughputPolicy(4)
    assert not start(policy, knowledge)
    assert policy.knowledge() == ThroughputPolicy(4).knowledge()
