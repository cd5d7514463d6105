"""An engine that follows grammars, with and without speculation, alone and in a batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

import eagle_mlx as em
from eagle_mlx.policy import FixedPolicy
from eagle_mlx.proposers.ngram import NgramProposer
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.serve.chat import AnswerParser, ChatFormat, Grammars, ToolOffer
from tests.full import diagonal, in_full
from tests.serve.chat.formats import (
    ANSWER,
    CALL,
    CLOCK,
    HELLO,
    SCHEMA,
    WEATHER,
    by_schema,
    target_of,
    tokenizer_of,
)

CASES = {
    "greedy": SamplingParams(max_tokens=400),
    "seeded": SamplingParams(max_tokens=400, temperature=1.0, seed=5),
    "filtered": SamplingParams(max_tokens=400, temperature=0.7, top_p=0.9, top_k=50, seed=6, repetition_penalty=1.1),
}


def by_the_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == list(SCHEMA["properties"])
        and isinstance(value["name"], str)
        and len(value["name"]) <= 8
        and value["level"] in ("low", "middle", "high")
        and len(value["counts"]) <= 3
        and all(type(count) is int and 0 <= count <= 99 for count in value["counts"])
        and value["open"] in (True, False, None)
    )


@pytest.mark.parametrize("case", in_full([*CASES], ["filtered"]))
@pytest.mark.parametrize("seed", in_full([0, 1], [0]))
def test_speculation_changes_no_constrained_text(case: str, seed: int) -> None:
    """Every text follows its grammar; a row without a grammar is not affected by the others."""
    target = target_of("qwen", seed=seed)
    format = ChatFormat.of(target)
    free = CASES[case]
    grammars = Grammars.of(target)
    schema = replace(free, grammar=grammars.grammar(by_schema(SCHEMA)))
    calls = replace(free, grammar=grammars.grammar(None, ToolOffer.of([WEATHER, CLOCK], "required", False)))
    prompts = [format.chat([{"role": "user", "content": f"{ANSWER} {word}"}]).tokens() for word in ("low", "high")]
    requests = [
        (prompts[0], schema),
        (prompts[1], replace(free, max_tokens=40)),
        (format.chat([{"role": "user", "content": CALL}], [WEATHER]).tokens(), calls),
        (prompts[1], schema),
    ]

    def texts(engine: em.Engine, company: bool) -> list[em.Output]:
        if company:
            return engine.generate([prompt for prompt, _ in requests], [params for _, params in requests])
        return [engine.generate([prompt], params)[0] for prompt, params in requests]

    alone = texts(em.Engine(target), company=False)
    assert [output.finish_reason for output in alone] == ["stop", alone[1].finish_reason, "stop", "stop"]
    assert by_the_schema(alone[0].text)
    assert by_the_schema(alone[3].text)
    called = AnswerParser(format, ToolOffer.of([WEATHER, CLOCK])).push(alone[2].text)
    assert [delta.tool_call is not None for delta in called] == [True]
    drafting = em.Engine(target, NgramProposer(), policy=FixedPolicy(3))
    for company in in_full((False, True), (True,)):
        outputs = texts(drafting, company)
        assert [output.tokens for output in outputs] == [output.tokens for output in alone]
        assert [output.text for output in outputs] == [output.text for output in alone]
    assert sum(output.accepted for output in outputs) > 0


@pytest.mark.parametrize(("proposer", "blanks"), diagonal([lambda: None, NgramProposer], ["", ",:", ",:{"]))
def test_a_schema_of_ten_required_fields_takes_at_most_a_quarter_of_the_rounds(proposer: Any, blanks: str) -> None:
    """The random model is made to spell with long tokens, as others do, and to write blanks, which are a choice, after
    the same letters each time."""
    target, tokenizer = target_of("qwen"), tokenizer_of("qwen")
    names = [f"{name}_{part}" for name in ("customer", "order") for part in ("id", "date", "name", "address", "total")]
    fields = {name: {"enum": [True, False]} for name in names}
    schema = {"type": "object", "properties": fields, "required": names, "additionalProperties": False}
    texts = [tokenizer.decode([token]) or " " for token in range(target.vocab_size)]
    bias = mx.array([-100.0 if text[0].isspace() else 50.0 * len(text) for text in texts])
    blank = mx.array([1000.0 * (text == " ") for text in texts])

    def style(text: Sequence[int], logits: mx.array) -> mx.array:
        return logits + bias + blank * (texts[text[-1]][-1] in blanks)

    grammar = Grammars.of(target).grammar(by_schema(schema))
    params = SamplingParams(max_tokens=400, grammar=grammar, logits_processors=(style,))
    prompt = ChatFormat.of(target).chat(HELLO).tokens()

    def answer(proposer: Any, k: int) -> em.Output:
        return em.Engine(target, proposer, policy=FixedPolicy(k)).generate([prompt], params)[0]

    plain, forced = answer(None, 0), answer(proposer(), 16)
    assert json.loads(forced.text).keys() == set(names)
    assert forced.tokens == plain.tokens
    assert forced.rounds <= plain.rounds / 4
    assert forced.rounds + forced.forced + forced.accepted == len(forced.tokens) == plain.rounds


def test_a_model_may_think_before_it_follows_the_schema() -> None:
    """A random model would not end its reasoning, so a bias helps."""
    target = target_of("thinking")
    format = ChatFormat.of(target)
    prompt = format.chat(HELLO, template_kwargs={"enable_thinking": True}).tokens()
    inside = format.starts_in_reasoning(prompt)
    assert inside
    make = Grammars.of(target).grammar(by_schema(SCHEMA), None, inside)
    end = tokenizer_of("thinking").encode("</think>", add_special_tokens=False)[0]
    params = SamplingParams(max_tokens=300, temperature=1, seed=3, grammar=make, logit_bias={end: 5.0})
    output = em.Engine(target, NgramProposer(), policy=FixedPolicy(3)).generate([prompt], params)[0]
    reader = AnswerParser(format, starts_in_reasoning=inside)
    deltas = [*reader.push(output.text), *reader.finish()]
    assert by_the_schema("".join(delta.content for delta in deltas))
    assert "".join(delta.reasoning for delta in deltas)


def test_schemas_that_are_too_complex_to_follow_fail_alone() -> None:
    """The chain compiles, but has more open ends than a parser's row allows."""
    chain: dict[str, Any] = {
        f"{i:x}": {"anyOf": [{"$ref": f"#/$defs/{i + 1:x}"}, {"type": "null"}]} for i in range(1_020)
    }
    target = target_of("plain")
    grammars = Grammars.of(target)
    make = grammars.grammar(by_schema({"$defs": {**chain, "3fc": {"type": "string"}}, "$ref": "#/$defs/0"}))
    other = grammars.grammar(by_schema(SCHEMA))
    params = SamplingParams(max_tokens=8, grammar=make)
    engine = em.Engine(target)
    rows = [engine.prepare([5, 6], params), engine.prepare([5, 6], replace(params, grammar=other))]
    for row in rows:
        engine.submit(row)
    while not engine.idle:
        engine.step()
    assert [row.finish_reason for row in rows] == ["error", "length"]
    assert "the grammar failed: the text cannot follow it any further" in (rows[0].error or "")


MARKED = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "a<tool_call>b</tool_call>", "<", "e\u0301", "\u1112\u1161")
"""Texts with tokens that have a meaning in chats, and letters with two Unicode forms."""


def only(value: str) -> dict[str, Any]:
    properties = {"k": {"const": value}, value: {"type": "boolean"}}
    return {"type": "object", "properties": properties, "required": ["k", value], "additionalProperties": False}


@pytest.mark.parametrize(
    ("proposer", "special", "normalizer"), diagonal([lambda: None, NgramProposer], [False, True], [None, "NFC"])
)
def test_a_text_that_looks_like_special_tokens_is_written_as_text(
    proposer: Any, special: bool, normalizer: str | None
) -> None:
    """Such a text is forced: none of its tokens may have another meaning or end the text."""
    target = target_of("qwen", special, normalizer=normalizer)
    grammars = Grammars.of(target)
    engine = em.Engine(target, proposer(), policy=FixedPolicy(3))
    prompt = ChatFormat.of(target).chat(HELLO).tokens()
    makes = [grammars.grammar(by_schema(only(value))) for value in MARKED]
    params = [SamplingParams(max_tokens=500, temperature=1.0, grammar=make) for make in makes]
    for output, value in zip(engine.generate([prompt] * len(MARKED), params), MARKED, strict=True):
        assert (output.finish_reason, output.error) == ("stop", None)
        assert json.loads(output.text).keys() == {"k", value}
        assert json.loads(output.text)["k"] == value
