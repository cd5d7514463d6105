"""Grammars of the call formats that this project parses itself: gpt-oss, Llama and DeepSeek."""

from __future__ import annotations

import pytest

from eagle_mlx.serve.chat import AnswerParser, Grammars, ToolOffer, whole_calls
from tests.serve.chat.formats import (
    ANSWER,
    CLOCK,
    SCHEMA,
    WEATHER,
    allows,
    by_schema,
    format_of,
    target_of,
)

GRAMMARS = {
    (name, special): Grammars.of(target_of(name, special))
    for name in ("gpt-oss", "llama3", "deepseek")
    for special in (False, True)
}
STRICT = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
THOUGHT = "<|channel|>analysis<|message|>hm {<|end|><|start|>assistant"
HARMONY = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{}"
DEEPSEEK = (
    "<\uff5ctool▁calls▁begin\uff5c>{}<\uff5ctool▁calls▁end\uff5c>",
    "<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>get_weather\n```json\n{}\n```<\uff5ctool▁call▁end\uff5c>",
)


@pytest.mark.parametrize("special", [False, True])
def test_calls_in_other_json_formats_are_forced(special: bool) -> None:
    right = ['{"city": "Rome", "days": 3}', '{"city": "Oslo", "days": 9}']
    wrong = '{"city": "Bonn", "days": 3}'

    def may(name: str, text: str, parallel: bool = True, inside: bool = False) -> bool:
        offer = ToolOffer.of([WEATHER, CLOCK], "required", parallel)
        grammar = GRAMMARS[name, special].grammar(None, offer, inside)
        reader = AnswerParser(format_of(name, special), ToolOffer.of([WEATHER, CLOCK]), inside)
        parsed = [delta.tool_call for delta in [*reader.push(text), *reader.finish()]]
        allowed = allows(grammar, text, name, special)
        assert not allowed or None not in parsed[inside or text.startswith(THOUGHT) :]
        if allowed:
            reader = AnswerParser(format_of(name, special), ToolOffer.of([WEATHER, CLOCK]), inside, enforced=True)
            pieces = [delta.tool_call for letter in text for delta in reader.push(letter)]
            calls = whole_calls(pieces)
            assert [(call.name, call.arguments) for call in calls] == [(c.name, c.arguments) for c in parsed if c]
            assert len(pieces) > 10 * len(calls)
        return allowed

    assert may("gpt-oss", HARMONY.format(right[0]))
    assert may("gpt-oss", THOUGHT + HARMONY.format(right[0]))
    assert not may("gpt-oss", HARMONY.format(right[0]).replace("get_weather", "got"))
    assert not may("gpt-oss", HARMONY.format(wrong))
    assert not may("gpt-oss", "<|channel|>final<|message|>no")
    llama = [f'{{"name": "get_weather", "parameters": {arguments}}}' for arguments in [*right, wrong]]
    assert may("llama3", llama[0])
    assert may("llama3", "; ".join(llama[:2]))
    assert not may("llama3", "; ".join(llama[:2]), parallel=False)
    assert not may("llama3", llama[2])
    deepseek = [DEEPSEEK[1].format(arguments) for arguments in [*right, wrong]]
    assert may("deepseek", "hm</think>\n\n" + DEEPSEEK[0].format("\n".join(deepseek[:2])), inside=True)
    assert may("deepseek", DEEPSEEK[0].format(deepseek[0]), parallel=False)
    assert not may("deepseek", DEEPSEEK[0].format("\n".join(deepseek[:2])), parallel=False)
    assert not may("deepseek", DEEPSEEK[0].format(deepseek[2]))


@pytest.mark.parametrize("special", [False, True])
def test_an_answer_by_a_schema_goes_to_gpt_oss_final_channel(special: bool) -> None:
    grammar = GRAMMARS["gpt-oss", special].grammar(by_schema(SCHEMA))
    text = f"{THOUGHT}<|channel|>final <|constrain|>json<|message|>{ANSWER}"
    assert allows(grammar, text, "gpt-oss", special)
    assert not allows(grammar, ANSWER, "gpt-oss", special)
    reader = AnswerParser(format_of("gpt-oss", special))
    deltas = [*reader.push(text), *reader.finish()]
    assert [(delta.reasoning, delta.content) for delta in deltas] == [("hm {", ""), ("", ANSWER)]


def test_strict_tools_are_held_to_their_schemas_if_calls_have_a_tag_of_their_own() -> None:
    offer = ToolOffer.of([STRICT])
    right = DEEPSEEK[0].format(DEEPSEEK[1].format('{"city": "Rome", "days": 3}'))
    grammar = GRAMMARS["deepseek", False].grammar(None, offer)
    assert allows(grammar, f"So: {right}", "deepseek")
    assert not allows(grammar, f"So: {right.replace('Rome', 'Bonn')}", "deepseek")
    for name in ("gpt-oss", "llama3"):
        assert GRAMMARS[name, False].grammar(None, offer) is None
