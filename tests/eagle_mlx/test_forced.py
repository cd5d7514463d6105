"""Tokens that a grammar forces are drafted, with or without a proposer, and counted apart. The text stays the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

import eagle_mlx as em
from eagle_mlx.plan import FORCED, MATCH, Abilities, Context, Plan, RoundResult
from eagle_mlx.policy import Policy
from eagle_mlx.request_state import ForcedText
from tests.eagle_mlx.heads import PROPOSERS
from tests.eagle_mlx.worlds import World, result
from tests.fakes import tiny_target
from tests.full import diagonal
from tests.grammars import Steps

TARGET = tiny_target(vocab=96)
PROMPTS = [[7, 8, 9, 7, 8], [30, 31], [50, 40, 50, 40, 50]]
MANNERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 0.9, "seed": 4},
    "penalties": {"temperature": 0.7, "seed": 2, "presence_penalty": 1.0},
}


class Keys(Steps):
    """After each multiple of 6, the next five tokens must follow, as in a key of a schema."""

    end = None

    def allowed(self, token: int) -> bool:
        if self.taken and self.taken[-1] % 6 < 5:
            return token == self.taken[-1] + 1
        return token % 6 == 0


class Wrong(Keys):
    """Says that tokens are forced which its own mask does not allow."""

    def forced(self, most: int) -> list[int]:
        return [*super().forced(most)[:1], 200, -3][:most]


class Endless(Keys):
    """Gives more tokens than it was asked for, and one that is no token id."""

    def forced(self, most: int) -> list[int]:
        return [*super().forced(most), *range(40), 1 << 40]


class Raises(Keys):
    def forced(self, most: int) -> list[int]:
        raise RuntimeError("no answer")


class Numbers(Steps):
    """A key of six tokens, then a number of digits below 10, and again."""

    end = None

    def allowed(self, token: int) -> bool:
        last = self.taken[-1] if self.taken else 0
        if 50 <= last < 55:
            return token == last + 1
        return token < 10 or (token == 50 and last < 10)


def decode(
    proposer: Any, policy: Policy, grammar: Callable[[], Any] = Keys, **more: Any
) -> tuple[list[em.Output], list[RoundResult]]:
    """Return the outputs of two rows with a grammar and one without, and the rounds."""
    engine, results = em.Engine(TARGET, proposer, policy=policy, max_batch=3), list[RoundResult]()
    engine.observer = results.append
    guided = em.SamplingParams(max_tokens=42, grammar=grammar, **more)
    return engine.generate(PROMPTS, [guided, replace(guided, grammar=None), guided]), results


@pytest.mark.parametrize(("name", "manner"), diagonal(PROPOSERS, MANNERS))
def test_forced_tokens_take_few_rounds_and_change_no_text(name: str, manner: str) -> None:
    plain, _ = decode(None, em.FixedPolicy(0), **MANNERS[manner])
    outputs, results = decode(PROPOSERS[name](TARGET), em.FixedPolicy(8), **MANNERS[manner])
    assert [output.tokens for output in outputs] == [output.tokens for output in plain]
    for at in (0, 2):
        assert outputs[at].forced >= 30
        assert outputs[at].rounds <= 42 / 6 + 5 < plain[at].rounds == 42
    assert outputs[1].forced == 0
    alone = em.Engine(TARGET, PROPOSERS[name](TARGET), policy=em.FixedPolicy(8))
    output = alone.generate(PROMPTS[0], em.SamplingParams(max_tokens=42, grammar=Keys, **MANNERS[manner]))
    assert output.tokens == plain[0].tokens
    assert [output.draft_failures for output in [*outputs, output]] == [0, 0, 0, 0]
    drafted = sum(sum(result.drafted_freely) for result in results)
    assert drafted == sum(output.drafted for output in outputs)
    assert (drafted > 0) == (name != "none")


def test_the_default_policy_drafts_forced_tokens_without_a_proposer() -> None:
    plain, _ = decode(None, em.FixedPolicy(0))
    engine = em.Engine(TARGET, max_batch=1, clock=map(float, count()).__next__)
    output = engine.generate(PROMPTS[0], em.SamplingParams(max_tokens=42, grammar=Keys))
    assert output.tokens == plain[0].tokens
    assert output.forced > 0


@pytest.mark.parametrize("grammar", [Wrong, Endless, Raises])
def test_a_grammar_whose_forced_tokens_are_wrong_costs_only_time(grammar: type[Keys]) -> None:
    plain, _ = decode(None, em.FixedPolicy(0))
    outputs, _ = decode(em.NgramProposer(), em.FixedPolicy(4), grammar)
    assert [(output.tokens, output.error) for output in outputs] == [(output.tokens, None) for output in plain]


def test_after_numbers_of_as_many_digits_the_next_key_is_drafted() -> None:
    """Only digits take rounds; that numbers have two is known after the second."""
    text = [token for digit in range(10) for token in (*range(50, 56), digit, (3 * digit + 1) % 10)]
    grammar, forced, at, rounds = Numbers(), ForcedText(), 0, 0
    while at < len(text):
        forced.look(grammar, text[:at], FORCED)
        right = next((n for n, (a, b) in enumerate(zip(forced.draft, text[at:], strict=False)) if a != b), None)
        taken = text[at : at + 1 + (len(forced.draft) if right is None else right)]
        assert all(map(grammar.advance, taken))
        at, rounds = at + len(taken), rounds + 1
    assert rounds <= 2 * 10 + 3


def test_a_request_without_drafts_has_no_forced_ones() -> None:
    outputs, _ = decode(None, em.FixedPolicy(4), num_speculative_tokens=0)
    assert [output.forced for output in outputs] == [0, 0, 0]
    outputs, _ = decode(em.NgramProposer(), em.FixedPolicy(4), drafter="none")
    assert [output.forced > 0 for output in outputs] == [True, False, True]
    assert [output.drafted for output in outputs] == [0, 0, 0]


@pytest.mark.parametrize("model", [False, True])
def test_the_policy_takes_forced_tokens_if_the_curve_allows_it_and_learns_no_acceptance_from_them(model: bool) -> None:
    for curve, pays in (("M5 Max", True), ("M1 and M2", False)):
        policy, world = em.ThroughputPolicy(), World(curve, chance=0.0)
        policy.costs.curve = world.curve_at(1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32)
        world.run(policy, 20, rows=2)
        plain, context = policy.costs.estimate("plain", 2, 0), Context(2, Abilities(model=model), sources=(0, 8))
        plans = list[Plan]()
        for _ in range(60):
            plans.append(policy.plan(context))
            drafted = list(plans[-1].lookups or [plans[-1].depth] * 2)
            seconds = world.cost(2, plans[-1], plans[-1].size)
            kept = [drafted[row] if plans[-1].lookups else 0 for row in range(2)]
            forced = [count > 0 for count in plans[-1].lookups]
            policy.observe(replace(result(plans[-1], drafted, kept, seconds), forced=forced))
        taken = sum(any(plan.lookups) for plan in plans)
        assert taken > 45 if pays else taken < 15
        assert policy.acceptance <= 0.5
        assert policy.costs.estimate("plain", 2, 0) <= 1.05 * plain


def test_forced_tokens_stand_before_a_match() -> None:
    engine = em.Engine(TARGET, em.NgramProposer(), policy=em.FixedPolicy(0), max_batch=1)
    request = engine.prepare(PROMPTS[0], em.SamplingParams(max_tokens=30, grammar=Keys))
    engine.submit(request)
    seen = set()
    while not engine.idle:
        engine.step()
        for batch in engine.groups.batches:
            [source] = batch.sources([None]) or [0]
            assert source == request.forced.likely or (source < 0 and not request.forced.draft)
            seen.add(source)
    assert {1, 5} <= seen
    assert MATCH * 16 in seen, "the longest match"
