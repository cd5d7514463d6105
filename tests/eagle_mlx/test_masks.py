"""Grammars: with any drafts and company, all rows get the text of plain decoding."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

import eagle_mlx as em
from eagle_mlx.proposers.draft_model import DraftModelProposer
from eagle_mlx.sampling_params import SamplingParams
from tests.architectures import tiny_model
from tests.eagle_mlx.test_processors import Guess
from tests.fakes import tiny_head, tiny_target
from tests.full import FULL, diagonal
from tests.grammars import END, Steps

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 7, 8, 7, 8, 7], [90, 3]]
KINDS: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 0.9, "seed": 3, "top_p": 0.95}}
LENGTH = 16


def params_of(grammar: Any, kind: str, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, grammar=grammar, stop_token_ids=(END,), **KINDS[kind], **more)


NAMES = ["llama", "qwen3_next", "mamba2", "lfm2", "gemma3_text", "gpt_oss"]


@pytest.mark.parametrize(("name", "kind"), diagonal(NAMES, KINDS))
def test_masks_change_no_text_of_any_architecture(name: str, kind: str) -> None:
    mx.random.seed(1)
    target = em.Target(tiny_model(name))
    free = SamplingParams(max_tokens=LENGTH, **KINDS[kind])
    penalized = SamplingParams(max_tokens=LENGTH, repetition_penalty=1.3, **KINDS[kind])
    requests = [(PROMPTS[0], Steps), (PROMPTS[1], None), (PROMPTS[2], Steps), (PROMPTS[0], penalized)]

    params = [params_of(Steps, kind) if grammar is Steps else grammar or free for _, grammar in requests]
    alone = [
        em.Engine(target).generate([p], sampling)[0].tokens for (p, _), sampling in zip(requests, params, strict=True)
    ]
    texts = [[*prompt, *text] for (prompt, _), text in zip(requests, alone, strict=True)]
    drafting: list[Any] = [None, Guess(texts, vocab=96), em.NgramProposer(), Guess(texts, 0.0)]
    turn = NAMES.index(name) // 2 % 2
    for proposer in drafting if FULL else drafting[turn::2]:  # alternate unless in full
        engine = em.Engine(target, proposer, policy=em.FixedPolicy(3), max_batch=4)
        outputs = engine.generate([p for p, _ in requests], params)
        assert [output.error for output in outputs] == [None] * 4
        assert [output.tokens for output in outputs] == alone
        assert all(output.accepted + output.rounds >= len(output.tokens) for output in outputs)


@pytest.mark.parametrize(("drafts", "kind"), diagonal(["model", "head"], KINDS))
def test_heads_and_draft_models_follow_grammars(drafts: str, kind: str) -> None:
    target = tiny_target(vocab=96)
    plain = em.Engine(target).generate(PROMPTS, params_of(Steps, kind))
    proposer: Any = (
        em.HeadProposer(tiny_head(target)) if drafts == "head" else DraftModelProposer(tiny_target(vocab=96))
    )
    outputs = em.Engine(target, proposer, policy=em.FixedPolicy(3)).generate(PROMPTS, params_of(Steps, kind))
    assert [output.tokens for output in outputs] == [output.tokens for output in plain]
    if drafts == "model" and kind == "greedy":  # the target itself, whose drafts are all accepted if the grammar allows
        assert sum(output.accepted for output in outputs) > 0


def test_grammars_never_get_drafted_stop_tokens() -> None:
    """The grammars above assert this."""
    target = tiny_target(vocab=96)
    params = params_of(Steps, "greedy", logit_bias={END: 3.0})
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


class Raises(DeadEnds):
    """Raises after such a jump."""

    def mask(self) -> mx.array:
        mask = super().mask()
        if not mask.any():
            raise RuntimeError("a dead end")
        return mask


def test_a_grammar_that_raises_after_a_draft_token_fails_only_texts_with_that_token() -> None:
    target = tiny_target(vocab=96)
    plain = em.Engine(target).generate([PROMPTS[1]], params_of(DeadEnds, "greedy"))[0]
    text = [*PROMPTS[1], *plain.tokens]
    leaps = [[*text[:n], (text[n - 1] + 30) % 96, 1, 2] for n in range(len(PROMPTS[1]), len(text))]
    engine = em.Engine(target, Guess(leaps, 0.0), policy=em.FixedPolicy(4))  # type: ignore[arg-type]
    output = engine.generate([PROMPTS[1]], params_of(Raises, "greedy"))[0]
    assert (output.tokens, output.error) == (plain.tokens, None)
    output = engine.generate([PROMPTS[1]], params_of(Raises, "seeded"))[0]
    assert (len(output.tokens), output.error) == (5, "the grammar failed: a dead end")


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
