"""Heads that draft along recorded answers give the rounds of real decoding, and are compared conversation by
conversation."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.errors import EagleError
from eagle_mlx.judge import Judge, draft_along, read_text
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.target import Target
from tests.eagle_mlx import heads
from tests.fakes import Oracle, tiny_head, tiny_target
from tests.full import in_turn

DEPTH = 4


def prompts(target: Target, count: int = 3) -> list[list[int]]:
    """Return prompts of different lengths, the first of one token."""
    rng = np.random.default_rng(0)
    return [rng.integers(4, target.vocab_size, 1 + 3 * length).tolist() for length in range(count)]


def check_rounds(target: Target, proposer: Proposer, depth: int = DEPTH, tokens: int = 12) -> int:
    """Compare the rounds along recorded answers with those of real decoding; return the accepted draft tokens.

    The second answer is a hot sample, in which the noise that target and drafts share decides most tokens.
    """
    engine = em.Engine(target, proposer, policy=em.FixedPolicy(depth), max_batch=3)
    judge = Judge(target, proposer, proposer, depth)
    own = [em.SamplingParams(temperature=2.0 * (at % 2), seed=at, max_tokens=tokens) for at in range(3)]
    accepted = 0
    for prompt, params, output in zip(prompts(target), own, engine.generate(prompts(target), own), strict=True):
        recording = read_text(target, judge.layers, [*prompt, *output.tokens], len(prompt), params)
        drafting = draft_along(proposer, recording, depth, target)
        assert drafting.decoded.tokens == len(output.tokens)
        assert len(drafting.accepted) == drafting.decoded.rounds == output.rounds
        counts = [sum(count > place for count in drafting.accepted) for place in range(depth)]
        assert counts == [*output.accepted_by_position, *[0] * depth][:depth]
        accepted += sum(counts)
    return accepted


@pytest.mark.parametrize("kind", in_turn(heads.ALL, 1))
def test_every_kind_of_head_has_the_rounds_of_real_decoding(kind: str) -> None:
    target = tiny_target(vocab=48)
    assert check_rounds(target, em.HeadProposer(heads.ALL[kind](target))) > 0


@pytest.mark.parametrize("name", ["draft model", "recurrent draft model"])
def test_other_proposers_too(name: str) -> None:
    target = tiny_target(vocab=48)
    assert check_rounds(target, heads.PROPOSERS[name](target)) > 0


def test_a_text_that_ends_in_an_accepted_draft_has_no_further_round() -> None:
    """With the target as its own draft model, all drafts are accepted, and a round is cut by the answer's end."""
    target = tiny_target(vocab=48)
    for tokens in (9, 10, 11):
        assert check_rounds(target, em.DraftModelProposer(Target(target.model)), tokens=tokens) > 0


PARAMS = em.SamplingParams(max_tokens=32)


def varied(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Keep answers that loop, since those of tiny models do; return prompts."""
    monkeypatch.setattr("eagle_mlx.judge.is_loop", lambda tokens: False)
    return [[4 + seed, 5, 6 + seed] for seed in range(8)]


def oracle(target: Target, texts: list[list[int]], wrong: float) -> Oracle:
    outputs = em.Engine(target).generate(texts, PARAMS)
    return Oracle({tuple(text): output.tokens for text, output in zip(texts, outputs, strict=True)}, wrong)


def test_the_better_head_is_told_and_the_worse_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    texts = varied(target, monkeypatch)
    good, bad = oracle(target, texts, 0.1), oracle(target, texts, 0.7)
    curve = [(1, 1.0), (8, 1.7)]
    forth = Judge(target, bad, good, DEPTH).compare(texts, PARAMS, curve, progress=False)
    back = Judge(target, good, bad, DEPTH).compare(texts, PARAMS, curve, progress=False)
    assert (forth.gain.verdict, back.gain.verdict) == ("better", "worse")
    assert forth.second.acceptance_length > forth.first.acceptance_length > 1
    assert forth.acceptance.gain == pytest.approx(
        forth.second.acceptance_length / forth.first.acceptance_length - 1, abs=1e-9
    )
    assert (forth.tokens, forth.left_out, forth.acceptance.conversations) == (8 * 32, 0, 8)


def test_a_head_against_itself_is_not_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    texts = varied(target, monkeypatch)
    same = [em.HeadProposer(tiny_head(target)) for _ in range(2)]
    comparison = Judge(target, *same, DEPTH).compare(texts, PARAMS, [(1, 0.1), (8, 0.2)], progress=False)
    assert comparison.speed is not None
    assert (comparison.speed.verdict, comparison.speed.gain) == ("not told apart", pytest.approx(0, abs=1e-12))
    assert comparison.first.acceptance_by_position == comparison.second.acceptance_by_position


def test_drafts_that_cost_more_weigh_against_more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without drafts a round reads one token; the curve makes five as dear as ten rounds of one."""
    target = tiny_target()
    texts = varied(target, monkeypatch)
    none, all_right = oracle(target, texts, 1.0), oracle(target, texts, 0.0)
    none.name = "none"
    monkeypatch.setattr(type(none), "weight_bytes", property(lambda self: int(self.name == "none")))
    comparison = Judge(target, none, all_right, DEPTH).compare(texts, PARAMS, [(1, 1.0), (5, 10.0)], progress=False)
    assert comparison.acceptance.verdict == "better"
    assert comparison.first.tokens_per_second == pytest.approx(
        comparison.first.acceptance_length / (10 + comparison.first.draft_seconds)
    )


def test_answers_that_loop_are_left_out() -> None:
    target = tiny_target()
    judge = Judge(target, em.NgramProposer(), em.NgramProposer(), DEPTH)
    with pytest.raises(EagleError, match="answers to all 2 prompts loop; use other prompts"):
        judge.compare([[5, 6, 7], [8, 9]], em.SamplingParams(max_tokens=200), progress=False)
    assert judge.left_out == 2


def test_only_the_layers_that_a_head_reads_are_recorded() -> None:
    target = tiny_target()
    judge = Judge(target, em.NgramProposer(), em.HeadProposer(tiny_head(target)), DEPTH)
    recording = read_text(target, judge.layers, [5, 6, 7, 8], 2, PARAMS)
    assert set(recording.states) == set(tiny_head(target).aux_layers)
    assert {states.shape for states in recording.states.values()} == {(1, 3, target.hidden_size)}
    assert all(states.dtype == mx.float32 for states in recording.states.values())
