"""Grammars with asynchronous masks: whenever they come, all rows get the text of plain decoding."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
import pytest

import eagle_mlx as em
from eagle_mlx.proposers.draft_model import DraftModelProposer
from eagle_mlx.sampling_params import AsyncGrammar, SamplingParams
from tests.architectures import tiny_model
from tests.eagle_mlx.test_processors import Guess
from tests.fakes import tiny_head, tiny_target
from tests.full import FULL, diagonal
from tests.grammars import END, LateSteps, Never, Steps

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 7, 8, 7, 8, 7], [90, 3]]
KINDS: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 0.9, "seed": 3, "top_p": 0.95}}
LENGTH = 16


def params_of(grammar: Any, kind: str, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, grammar=grammar, stop_token_ids=(END,), **KINDS[kind], **more)


NAMES = ["llama", "qwen3_next", "mamba2", "lfm2", "gemma3_text", "gpt_oss"]


@pytest.mark.parametrize(("name", "kind"), diagonal(NAMES, KINDS))
def test_skipped_rounds_change_no_text(name: str, kind: str) -> None:
    mx.random.seed(1)
    target = em.Target(tiny_model(name))
    free = SamplingParams(max_tokens=LENGTH, **KINDS[kind])
    penalized = SamplingParams(max_tokens=LENGTH, repetition_penalty=1.3, **KINDS[kind])
    requests = [(PROMPTS[0], Steps), (PROMPTS[1], None), (PROMPTS[2], Steps), (PROMPTS[0], penalized)]

    def asked(grammar: Any, number: int, made: list[LateSteps]) -> SamplingParams:
        if grammar is not Steps:
            return grammar or free
        if number < 0:
            return params_of(Steps, kind)

        def make() -> LateSteps:
            made.append(LateSteps(number))
            return made[-1]

        return params_of(make, kind)

    alone = [em.Engine(target).generate([p], asked(g, -1, []))[0].tokens for p, g in requests]
    texts = [[*prompt, *text] for (prompt, _), text in zip(requests, alone, strict=True)]
    drafting: list[Any] = [None, Guess(texts, vocab=96), em.NgramProposer(), Guess(texts, 0.0)]
    turn = NAMES.index(name) // 2 % 2
    for proposer in drafting if FULL else drafting[turn::2]:  # alternate unless in full
        made: list[LateSteps] = []
        engine = em.Engine(target, proposer, policy=em.FixedPolicy(3), max_batch=4)
        outputs = engine.generate([p for p, _ in requests], [asked(g, i, made) for i, (_, g) in enumerate(requests)])
        assert [output.error for output in outputs] == [None] * 4
        assert [output.tokens for output in outputs] == alone
        assert sum(grammar.late for grammar in made) > 0
        assert all(output.accepted + output.rounds >= len(output.tokens) for output in outputs)


@pytest.mark.parametrize(("drafts", "kind"), diagonal(["model", "head"], KINDS))
def test_heads_and_draft_models_continue_after_skipped_rounds(drafts: str, kind: str) -> None:
    target = tiny_target(vocab=96)
    plain = em.Engine(target).generate(PROMPTS, params_of(Steps, kind))
    proposer: Any = (
        em.HeadProposer(tiny_head(target)) if drafts == "head" else DraftModelProposer(tiny_target(vocab=96))
    )
    made: list[LateSteps] = []
    seeds = iter(range(99))

    def make() -> LateSteps:
        made.append(LateSteps(next(seeds)))
        return made[-1]

    outputs = em.Engine(target, proposer, policy=em.FixedPolicy(3)).generate(PROMPTS, params_of(make, kind))
    assert [output.tokens for output in outputs] == [output.tokens for output in plain]
    assert sum(grammar.late for grammar in made) > 0
    if drafts == "model" and kind == "greedy":  # the target itself, whose drafts are all accepted if the grammar allows
        assert sum(output.accepted for output in outputs) > 0


def test_a_row_without_masks_delays_no_other_and_fails_alone() -> None:
    """The others wait for it once; then they get a token in every round."""
    assert isinstance(Never(), AsyncGrammar)
    target = tiny_target(vocab=96)
    engine, stuck = em.Engine(target, em.NgramProposer(), policy=em.FixedPolicy(2)), Never()
    plain = em.Engine(target).generate([PROMPTS[1]], SamplingParams(max_tokens=60))[0]
    rows = [
        engine.prepare(PROMPTS[0], params_of(lambda: stuck, "greedy")),
        engine.prepare(PROMPTS[1], SamplingParams(max_tokens=60)),
    ]
    for row in rows:
        engine.submit(row)
    while not rows[1].finish_reason:
        before = len(rows[1].tokens)
        engine.step()
        assert len(rows[1].tokens) > before
    assert rows[1].tokens == plain.tokens
    assert len(rows[0].tokens) == 1
    assert 0 < stuck.waited < 0.1
    assert not engine.step()
    assert rows[0].finish_reason is None
    stuck.broken = True
    while not engine.idle:
        engine.step()
    assert (rows[0].finish_reason, rows[0].error) == ("error", "the grammar failed: it takes too long")


def test_a_row_that_waits_for_masks_can_be_cancelled() -> None:
    engine = em.Engine(tiny_target(vocab=96))
    row = engine.prepare(PROMPTS[0], params_of(Never, "greedy"))
    engine.submit(row)
    for _ in range(4):
        engine.step()
    engine.cancel(row)
    assert engine.idle
    assert len(row.tokens) == 1


@pytest.mark.parametrize("make", [Steps, LateSteps], ids=["here", "elsewhere"])
def test_grammars_never_get_drafted_stop_tokens(make: Any) -> None:
    """The grammars above assert this."""
    target = tiny_target(vocab=96)
    params = params_of(make, "greedy", logit_bias={END: 3.0})
    plain = em.Engine(target).generate(PROMPTS, params)
    texts = [[*prompt, *output.tokens] for prompt, output in zip(PROMPTS, plain, strict=True)]
    ends = Guess([[*text[: len(text) - 2], END, END, END] for text in texts], 0.0)
    for proposer in (ends, Guess(texts, 0.0)):
        outputs = em.Engine(target, proposer, policy=em.FixedPolicy(4)).generate(PROMPTS, params)  # type: ignore[arg-type]
        assert [output.tokens for output in outputs] == [output.tokens for output in plain]
        assert [output.finish_reason for output in outputs] == [output.finish_reason for output in plain]


class Contradicts(Steps):
    """Refuses the third token, although its mask allowed it."""

    def advance(self, token: int) -> bool:
        return len(self.taken) < 2 and super().advance(token)


class Closed(Steps):
    """Allows the stop token only after the second token."""

    def allowed(self, token: int) -> bool:
        return (token != END or len(self.taken) == 2) and super().allowed(token)


@pytest.mark.parametrize("proposer", [lambda: None, em.NgramProposer], ids=["plain", "ngram"])
def test_stop_is_reported_only_if_the_text_may_end(proposer: Any) -> None:
    target = tiny_target(vocab=96)
    engine = em.Engine(target, proposer(), policy=em.FixedPolicy(3))
    output = engine.generate([PROMPTS[0]], params_of(Contradicts, "greedy"))[0]
    assert (output.finish_reason, len(output.tokens)) == ("error", 2)
    assert "the grammar rejected token" in (output.error or "")
    biased = params_of(Closed, "greedy", logit_bias={END: 1e4, 1: 1e3})
    output = engine.generate([PROMPTS[0]], biased)[0]
    assert output.finish_reason in ("stop", "length")
    assert END not in output.tokens[:2]


class DeadEnds(Steps):
    """Also allows a jump of 30, after which nothing is allowed."""

    def allowed(self, token: int) -> bool:
        if not self.taken:
            return True
        if len(self.taken) > 1 and (self.taken[-1] - self.taken[-2]) % self.vocab == 30:
            return False
        return (token - self.taken[-1]) % self.vocab == 30 or super().allowed(token)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_may_lead_to_an_empty_mask(kind: str) -> None:
    """The sampled text finally makes such a jump itself."""
    target = tiny_target(vocab=96)
    plain = em.Engine(target).generate([PROMPTS[1]], params_of(DeadEnds, kind))[0]
    assert (len(plain.tokens), plain.finish_reason) == ((LENGTH, "length") if kind == "greedy" else (5, "stop"))
    text = [*PROMPTS[1], *plain.tokens]
    leaps = [[*text[:n], (text[n - 1] + 30) % 96, 1, 2] for n in range(len(PROMPTS[1]), len(text))]
    engine = em.Engine(target, Guess(leaps, 0.0), policy=em.FixedPolicy(4))  # type: ignore[arg-type]
    output = engine.generate([PROMPTS[1]], params_of(DeadEnds, kind))[0]
    assert (output.tokens, output.finish_reason) == (plain.tokens, plain.finish_reason)


def test_a_stop_token_that_was_not_allowed_is_an_error() -> None:
    row = em.Engine(tiny_target(vocab=96)).prepare(PROMPTS[0], params_of(Closed, "greedy"))
    row.take([1, END], 0)
    assert (row.tokens, row.finish_reason) == ([1], "error")


def test_with_a_grammar_ignore_eos_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(em.Target, "eos_token_ids", frozenset({END}))
    target = tiny_target(vocab=96)
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, grammar=Steps, logit_bias={END: 50.0})
    output = em.Engine(target).generate([PROMPTS[0]], params)[0]
    assert (output.tokens, output.finish_reason) == ([END], "stop")


def test_patience_is_for_one_round() -> None:
    """All rows of a batch are waited for together."""
    target = tiny_target(vocab=96)
    stuck = [Never() for _ in range(4)]
    rows = [em.Engine(target).prepare(PROMPTS[0], params_of(lambda each=each: each, "greedy")) for each in stuck]
    engine = em.Engine(target)
    for row in rows:
        engine.submit(row)
    began = time.monotonic()
    while not all(row.slow for row in rows):
        engine.step()
        assert time.monotonic() - began < 60
    assert sum(each.waited for each in stuck) < 4 * 0.05 + 1
