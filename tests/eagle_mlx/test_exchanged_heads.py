"""Another head of the same shape takes over between steps: texts stay, and new requests are drafted by it."""

from __future__ import annotations

import pytest

import eagle_mlx as em
from eagle_mlx.engine.collector import Collector
from eagle_mlx.errors import HeadError
from eagle_mlx.formats.tensors import weights_of
from eagle_mlx.target import Target
from tests.eagle_mlx import heads
from tests.fakes import tiny_head, tiny_target

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]]
PARAMS = [em.SamplingParams(max_tokens=30), em.SamplingParams(temperature=1.0, seed=3, max_tokens=30)]
POLICIES = [em.FixedPolicy(3), em.FixedPolicy(4, 8)]


def pair(kind: str, target: Target) -> tuple[em.HeadProposer, em.HeadProposer]:
    """Return two bound heads with different weights."""
    first, second = (em.HeadProposer(heads.ALL[kind](target)) for _ in range(2))
    second.head.load_weights([(name, 0.7 * value) for name, value in weights_of(second.head).items()])
    for proposer in (first, second):
        proposer.bind(target)
    return first, second


@pytest.mark.parametrize("policy", POLICIES, ids=["chains", "trees"])
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", heads.ALL)
def test_texts_stay_when_the_head_changes_in_the_middle(
    kind: str, params: em.SamplingParams, policy: em.FixedPolicy
) -> None:
    target = tiny_target(vocab=48)
    expected = [output.tokens for output in em.Engine(target).generate(PROMPTS, params)]
    serving, other = pair(kind, target)
    collector = Collector(serving.head.named_layers, target.num_layers - 1, 1 << 20)
    engine = em.Engine(target, em.HybridProposer(serving), policy=policy, collector=collector, max_batch=3)
    requests = [engine.prepare(prompt, params) for prompt in PROMPTS]
    for request in requests:
        engine.submit(request)
    exchanges = 0
    while not engine.idle:
        engine.step()
        if exchanges < 3 and len(requests[0].tokens) > 6 * (exchanges + 1):
            serving.exchange(other)
            exchanges += 1
    assert exchanges == 3
    assert [request.tokens for request in requests] == expected
    assert sorted(example.tokens.tolist() for example in collector.take()) == sorted(
        [*prompt, *tokens] for prompt, tokens in zip(PROMPTS, expected, strict=True)
    )


@pytest.mark.parametrize("kind", heads.ALL)
def test_new_requests_are_drafted_by_the_new_head(kind: str) -> None:
    target = tiny_target(vocab=48)

    def rounds(engine: em.Engine) -> list[list[int]]:
        outputs = engine.generate(PROMPTS, em.SamplingParams(temperature=2.0, seed=5, max_tokens=40))
        return [output.accepted_by_position for output in outputs]

    serving, other = pair(kind, target)
    fresh = rounds(em.Engine(target, other, policy=POLICIES[0]))
    engine = em.Engine(target, serving, policy=POLICIES[0])
    former = rounds(engine)
    serving.exchange(other)
    assert rounds(engine) == fresh != former
    serving.exchange(other)
    assert rounds(engine) == former


def test_a_head_of_another_shape_is_refused() -> None:
    target = tiny_target(vocab=48)
    proposers = [em.HeadProposer(tiny_head(target, draft_vocab=size)) for size in (None, 16)]
    for proposer in proposers:
        proposer.bind(target)
    with pytest.raises(HeadError, match="different shapes"):
        proposers[0].exchange(proposers[1])
