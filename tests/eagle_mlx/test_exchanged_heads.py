"""Another head of the same shape takes over between steps: texts stay, and new requests are drafted by it."""

from __future__ import annotations

from itertools import product

import mlx.core as mx
import pytest

import eagle_mlx as em
from eagle_mlx.engine.collector import Collector
from eagle_mlx.errors import HeadError
from eagle_mlx.formats.tensors import weights_of
from eagle_mlx.target import Target
from tests.eagle_mlx import heads
from tests.fakes import tiny_head, tiny_target
from tests.full import diagonal, in_turn

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]]
PARAMS = {
    "greedy": em.SamplingParams(max_tokens=20),
    "seeded": em.SamplingParams(temperature=1.0, seed=3, max_tokens=20),
}
POLICIES = {"chains": em.FixedPolicy(3), "trees": em.FixedPolicy(4, 8)}
EXCHANGES = 3
WAYS = list(product(PARAMS, POLICIES))


def pair(kind: str, target: Target) -> tuple[em.HeadProposer, em.HeadProposer]:
    """Return two bound heads with different weights."""
    first, second = (em.HeadProposer(heads.ALL[kind](target)) for _ in range(2))
    second.head.load_weights([(name, 0.7 * value) for name, value in weights_of(second.head).items()])
    for proposer in (first, second):
        proposer.bind(target)
    return first, second


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(vocab=48)


@pytest.fixture(scope="module")
def expected(target: Target) -> dict[str, list[list[int]]]:
    """Return the texts without drafts."""
    return {
        name: [output.tokens for output in em.Engine(target).generate(PROMPTS, params)]
        for name, params in PARAMS.items()
    }


@pytest.mark.parametrize(
    ("kind", "way"), diagonal(heads.ALL, WAYS), ids=lambda x: x if isinstance(x, str) else "-".join(x)
)
def test_texts_stay_when_the_head_changes_in_the_middle(
    kind: str, way: tuple[str, str], target: Target, expected: dict[str, list[list[int]]]
) -> None:
    params, policy = PARAMS[way[0]], POLICIES[way[1]]
    serving, other = pair(kind, target)
    collector = Collector(serving.head.named_layers, target.num_layers - 1, 1 << 20)
    engine = em.Engine(target, em.HybridProposer(serving), policy=policy, collector=collector, max_batch=3)
    requests = [engine.prepare(prompt, params) for prompt in PROMPTS]
    for request in requests:
        engine.submit(request)
    exchanges = 0
    while not engine.idle:
        engine.step()
        if exchanges < EXCHANGES and len(requests[0].tokens) > 4 * (exchanges + 1):
            serving.exchange(other)
            exchanges += 1
    assert exchanges == EXCHANGES
    assert [request.tokens for request in requests] == expected[way[0]]
    assert sorted(example.tokens.tolist() for example in collector.take()) == sorted(
        [*prompt, *tokens] for prompt, tokens in zip(PROMPTS, expected[way[0]], strict=True)
    )


@pytest.mark.parametrize("kind", in_turn(heads.ALL))
def test_new_requests_are_drafted_by_the_new_head(kind: str, target: Target) -> None:
    def rounds(engine: em.Engine) -> list[list[int]]:
        outputs = engine.generate(PROMPTS, em.SamplingParams(temperature=2.0, seed=5, max_tokens=24))
        return [output.accepted_by_position for output in outputs]

    serving, other = pair(kind, target)
    fresh = rounds(em.Engine(target, other, policy=POLICIES["chains"]))
    engine = em.Engine(target, serving, policy=POLICIES["chains"])
    former = rounds(engine)
    serving.exchange(other)
    assert rounds(engine) == fresh != former
    serving.exchange(other)
    assert rounds(engine) == former


def test_the_draft_vocabulary_goes_with_the_head(target: Target) -> None:
    serving, other = (em.HeadProposer(tiny_head(target, draft_vocab=16)) for _ in range(2))
    other.head.use_vocabulary(mx.arange(16, dtype=mx.int32) + 32)
    fresh, engine = em.Engine(target, other, policy=POLICIES["chains"]), em.Engine(target, serving)
    engine.use_policy(POLICIES["chains"])

    def accepted(engine: em.Engine) -> list[list[int]]:
        return [output.accepted_by_position for output in engine.generate(PROMPTS, PARAMS["seeded"])]

    expected, before = accepted(fresh), accepted(engine)
    serving.exchange(other)
    assert accepted(engine) == expected != before
    assert accepted(fresh) == before


def test_a_head_of_another_shape_is_refused(target: Target) -> None:
    proposers = [em.HeadProposer(tiny_head(target, draft_vocab=size)) for size in (None, 16)]
    for proposer in proposers:
        proposer.bind(target)
    with pytest.raises(HeadError, match="different shapes"):
        proposers[0].exchange(proposers[1])
