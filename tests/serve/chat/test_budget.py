"""A budget of tokens for a thought: its end tag follows, with the same text whatever drafts."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.request_state import AHEAD
from eagle_mlx.sampling_params import Grammar
from eagle_mlx.serve.chat import ChatFormat, Grammars, with_budget
from eagle_mlx.serve.chat.tools import AnswerStates
from eagle_mlx.serve.generate import main as generate
from eagle_mlx.serve.terminal_chat import main as chat
from tests.eagle_mlx.heads import PROPOSERS
from tests.fakes import tiny_target, tiny_target_folder
from tests.full import diagonal, in_full
from tests.serve.api.live import Live, live, loaded_format
from tests.serve.chat.formats import SCHEMA, VOCAB, format_of, target_of, with_format

TARGET, FORMAT = em.Target(tiny_target(vocab=VOCAB).model, target_of("thinking").tokenizer), format_of("thinking")
SPELLED = ChatFormat(target_of("plain").tokenizer, AnswerStates("<think>", "</think>"), None)
"""A format whose tags consist of several tokens, and whose template does not write thoughts."""
PROMPT = [5, 6, 7, 8]
ENDLESS = dict.fromkeys(TARGET.eos_token_ids, -100.0)
"""Biases against the tokens that end an answer, because `ignore_eos` does not apply with a grammar."""
GREEDY = em.SamplingParams(max_tokens=in_full(24, 16), logit_bias=ENDLESS)
SEEDED = replace(GREEDY, temperature=1.0, seed=7)


def tag_of(form: ChatFormat) -> list[int]:
    assert form.tokenizer is not None
    return list(form.tokenizer.encode("</think>" if form is SPELLED else "\n</think>", add_special_tokens=False))


def budgeted(form: ChatFormat, most: int, is_open: bool = True) -> Grammar:
    make = with_budget(form, VOCAB, most, is_open)
    assert make is not None
    return make()


def allowed(grammar: Grammar) -> list[int]:
    """Return the tokens that are allowed; none if all are."""
    mask = np.array(grammar.mask())
    return [] if mask.all() else np.flatnonzero(mask).tolist()


def read(grammar: Grammar, form: ChatFormat, text: str) -> Grammar:
    assert form.tokenizer is not None
    for token in form.tokenizer.encode(text, add_special_tokens=False):
        assert grammar.advance(token)
    return grammar


@pytest.mark.parametrize(
    ("proposer", "form", "params", "budget"),
    diagonal(PROPOSERS, [FORMAT, SPELLED], [GREEDY, SEEDED], [0, 1, 7]),
)
def test_a_thought_ends_after_its_budget_and_the_rest_is_what_the_model_says_then(
    proposer: str, form: ChatFormat, params: em.SamplingParams, budget: int
) -> None:
    assert form.tokenizer is not None
    plain, decode = em.Engine(TARGET), form.tokenizer.decode
    thought = plain.generate(PROMPT, params).tokens
    most = budget
    while decode(thought[:most]).endswith("\ufffd"):  # within a character
        most += 1
    begun = thought[:most] + tag_of(form)
    rest = plain.generate([*PROMPT, *begun], replace(params, max_tokens=GREEDY.max_tokens - len(begun))).tokens
    engine = em.Engine(TARGET, PROPOSERS[proposer](TARGET), policy=em.FixedPolicy(4))
    limited = replace(params, grammar=with_budget(form, VOCAB, budget, is_open=True))
    for _ in range(2):  # a memory knows the text the second time
        assert engine.generate(PROMPT, limited).tokens == begun + rest


def test_a_thought_that_ends_in_time_is_left_alone() -> None:
    for form in (FORMAT, SPELLED):
        grammar = read(budgeted(form, 12), form, "so.\n</think>")
        assert (
            allowed(read(grammar, form, "an answer that is longer than the thought may be, and has many tokens")) == []
        )


def test_an_end_tag_that_has_begun_is_completed() -> None:
    tag = tag_of(SPELLED)
    assert len(tag) > 2
    grammar = budgeted(SPELLED, 4)
    for token, following in zip([9, 9, *tag], [[], [], [], [tag[2]], *([t] for t in tag[3:]), []], strict=True):
        assert grammar.advance(token)
        assert allowed(grammar) == following


@pytest.mark.parametrize(("text", "is_limited"), [("\n <think>a b c d e", True), ("No <think>a b c d e", False)])
def test_a_thought_that_the_prompt_does_not_open_must_begin_the_answer(text: str, is_limited: bool) -> None:
    grammar = read(budgeted(FORMAT, 3, is_open=False), FORMAT, text)
    assert bool(allowed(grammar)) == is_limited


def test_a_character_of_several_tokens_is_completed_before_the_tag() -> None:
    assert FORMAT.tokenizer is not None
    tokens = FORMAT.tokenizer.encode("\U0001f680", add_special_tokens=False)
    assert len(tokens) > 2
    grammar = budgeted(FORMAT, 1)
    for token in tokens:
        assert allowed(grammar) == []
        assert grammar.advance(token)
    assert allowed(grammar) == tag_of(FORMAT)[:1]


def test_tokens_that_are_taken_back_do_not_count() -> None:
    rng, tag = np.random.default_rng(0), tag_of(SPELLED)
    grammar, text = budgeted(SPELLED, 5), list[int]()
    for _ in range(200):
        if text and rng.random() < 0.4:
            count = int(rng.integers(1, len(text) + 1))
            grammar.rollback(count)
            del text[-count:]
        text.append(int(rng.choice([9, 11, *tag])))
        grammar.advance(text[-1])
        fresh = budgeted(SPELLED, 5)
        for token in text:
            fresh.advance(token)
        assert allowed(grammar) == allowed(fresh)


def test_masks_are_computed_only_near_the_end_of_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = em.Engine(TARGET, em.NgramProposer(), policy=em.FixedPolicy(4))
    make, lengths = with_budget(FORMAT, VOCAB, AHEAD + 60, is_open=True), list[int]()
    assert make is not None
    params = replace(GREEDY, max_tokens=AHEAD + 120, grammar=make)
    request = engine.prepare(PROMPT, params)
    mask = type(request.grammar).mask

    def counted(grammar: Any) -> mx.array:
        lengths.append(len(request.tokens))
        return mask(grammar)

    monkeypatch.setattr(type(request.grammar), "mask", counted)
    engine.submit(request)
    while not engine.idle:
        engine.step()
    assert min(lengths) in range(60, 66)
    assert max(lengths) in range(AHEAD + 56, AHEAD + 64)  # a draft may reach beyond the tag
    assert request.tokens[AHEAD + 60 :][:2] == tag_of(FORMAT)


def test_an_answer_with_a_schema_follows_it_after_the_forced_tag() -> None:
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    inner = Grammars.of(TARGET, FORMAT).grammar(form, starts_in_reasoning=True)
    grammar = with_budget(FORMAT, VOCAB, 4, is_open=True, inner=inner)
    engine = em.Engine(TARGET, em.NgramProposer(), policy=em.FixedPolicy(4))
    for params in (GREEDY, SEEDED):
        tokens = engine.generate(PROMPT, replace(params, grammar=grammar)).tokens
        assert tokens[4:6] == tag_of(FORMAT)
        assert TARGET.tokenizer is not None
        assert TARGET.tokenizer.decode(tokens[6:]).lstrip().startswith("{")


def test_models_without_thoughts_have_no_budget() -> None:
    assert with_budget(format_of("qwen"), VOCAB, 5, is_open=False) is None


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(lambda: loaded_format("thinking")) as running:
        yield running


OPEN = {"chat_template_kwargs": {"enable_thinking": True}}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "temperature": 0}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {**CHAT, **OPEN, "reasoning": {"max_tokens": 5}}),
        ("chat/completions", {**CHAT, **OPEN, "thinking_budget": 5}),
        ("chat/completions", {**CHAT, **OPEN, "thinking_token_budget": 5}),
        ("chat/completions", {**CHAT, "chat_template_kwargs": {"enable_thinking": True, "thinking_budget": 5}}),
        ("responses", {"input": "hi", "max_output_tokens": 30, **OPEN, "reasoning": {"max_tokens": 5}}),
        ("messages", {**CHAT, "thinking": {"type": "enabled", "budget_tokens": 5}}),
    ],
)
def test_requests_set_a_budget_in_each_api(server: Live, path: str, fields: dict[str, Any]) -> None:
    answer = server.http.post(f"/v1/{path}", json=fields)
    assert answer.headers.get("x-ignored-fields") is None
    usage = answer.json()["usage"]
    [details] = (usage[name] for name in usage if name.startswith(("completion_tokens_d", "output_tokens_d")))
    assert list(details.values()) == [5 + len(tag_of(FORMAT))]


def test_a_servers_budget_is_for_requests_that_set_none(server: Live) -> None:
    loaded = server.service.loaded
    assert loaded is not None
    loaded.thinking_budget = 3
    counts = []
    for fields in ({}, {"thinking_budget": 6}, {"thinking_budget": 0}):
        body = server.http.post("/v1/chat/completions", json={**CHAT, **OPEN, **fields}).json()
        counts.append(body["usage"]["completion_tokens_details"]["reasoning_tokens"] - len(tag_of(FORMAT)))
    loaded.thinking_budget = None
    assert counts[:2] == [3, 6]
    assert counts[2] <= 0
    assert not body["choices"][0]["message"].get("reasoning_content")


def test_a_negative_budget_is_refused(server: Live) -> None:
    answer = server.http.post("/v1/chat/completions", json={**CHAT, "thinking_budget": -1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_budget")


def test_the_commands_limit_each_thought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(with_format(tiny_target_folder(tmp_path / "target"), "deepseek", tmp_path / "thinker"))
    usual = ["--target", folder, "--quiet", "--spec-decode", "ngram", "--max-tokens", "24", "--thinking-budget", "6"]
    rows = [json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in ("hi", "def f(x):")]
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nand then?\n"))
    texts = []
    for command, args in ((generate, ["hi"]), (generate, ["--file", str(tmp_path / "prompts.jsonl")]), (chat, [])):
        assert command([*usual, *args]) == 0
        texts += capsys.readouterr().out.splitlines() if "--file" in args else [capsys.readouterr().out]
    assert ["</think>" in text for text in texts] == [True] * 4
    assert texts[-1].count("</think>") == 2  # two turns
