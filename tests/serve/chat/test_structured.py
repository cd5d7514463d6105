"""Grammars: what they allow and refuse, and the matcher's interface to the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx.decoding.processors import walk
from eagle_mlx.errors import ConfigError
from eagle_mlx.sampling_params import Grammar
from eagle_mlx.serve.chat import ChatFormat, Grammars, ToolOffer
from eagle_mlx.serve.chat.structured import MOST_SCHEMA_BYTES
from eagle_mlx.serve.chat.tools import AnswerStates
from tests.full import diagonal, in_full, some
from tests.serve.chat.formats import (
    ANSWER,
    CALL,
    CLOCK,
    END,
    SCHEMA,
    VOCAB,
    WEATHER,
    allows,
    by_schema,
    format_of,
    target_of,
    tokenizer_of,
)

GRAMMARS = {
    (name, special): Grammars.of(target_of(name, special))
    for name in ("qwen", "thinking", "plain")
    for special in (False, True)
}


def compiled(
    format: Any, offer: ToolOffer | None = None, inside: bool = False, name: str = "plain"
) -> Callable[[], Grammar]:
    make = GRAMMARS[name, False].grammar(format, offer, inside)
    assert make is not None
    return make


def test_only_texts_that_fit_the_schema_are_allowed() -> None:
    make = compiled(by_schema(SCHEMA, strict=True, description="x"))
    assert allows(make, ANSWER)
    assert allows(make, ANSWER.replace(" ", ""))
    assert allows(make, json.dumps(json.loads(ANSWER), indent=4, ensure_ascii=False))
    for wrong in (
        ANSWER[:-1],
        ANSWER + " ",
        "Sure: " + ANSWER,
        ANSWER.replace("23", "100"),
        ANSWER.replace("high", "higher"),
        ANSWER.replace("null", "0"),
        ANSWER.replace("}", ', "more": 1}'),
        ANSWER.replace('"name"', " " * 60 + '"name"'),
    ):
        assert not allows(make, wrong)


def test_any_object_is_allowed_without_a_schema() -> None:
    make = compiled({"type": "json_object"})
    assert allows(make, ANSWER)
    assert allows(make, '{"a": {"b": [1.5e3, {}]}}')
    assert not allows(make, "[1]")


def test_characters_may_be_written_as_unicode_escapes() -> None:
    text = json.dumps({"city": "Zürich 🦉", "né": 1})
    assert "\\u00fcrich \\ud83e\\udd89" in text
    for schema in ({"type": "object"}, {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}}):
        assert allows(compiled(by_schema(schema)), text)
        assert not allows(compiled(by_schema(schema)), text.replace("\\udd89", ""))


def test_free_answers_have_no_grammar() -> None:
    grammars = GRAMMARS["qwen", False]
    assert grammars.grammar() is None
    assert grammars.grammar({"type": "text"}, ToolOffer.of([WEATHER])) is None
    assert grammars.grammar({"type": "text"}, ToolOffer.of([WEATHER], "none")) is None


@pytest.mark.parametrize(("name", "special"), diagonal(["qwen", "thinking"], [False, True]))
def test_forced_calls_are_calls_of_the_tools(name: str, special: bool) -> None:
    grammars = GRAMMARS[name, special]

    def may(offer: ToolOffer, text: str, inside: bool = False) -> bool:
        return allows(grammars.grammar({"type": "text"}, offer, inside), text, name, special)

    any_of = ToolOffer.of([WEATHER, CLOCK], "required")
    single = ToolOffer.of([WEATHER, CLOCK], "required", parallel=False)
    clock = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    assert may(any_of, CALL)
    assert may(any_of, clock)
    assert may(any_of, f"{CALL}\n{clock}\n{CALL}")
    assert not may(single, f"{CALL}\n{clock}")
    assert may(single, clock)
    named = ToolOffer.of([WEATHER, CLOCK], {"type": "function", "function": {"name": "clock"}})
    assert may(named, clock)
    assert not may(named, CALL)
    for wrong in ("", "no", CALL.replace("3", "10"), CALL.replace("Rome", "Bonn"), CALL.replace(', "days": 3', "")):
        assert not may(any_of, wrong)
    assert may(any_of, f"<think>\nhm <é\n</think>\n\n{CALL}") == (name == "thinking")


@pytest.mark.parametrize("special", [False, True])
def test_a_model_may_think_before_it_answers(special: bool) -> None:
    def may(text: str, inside: bool) -> bool:
        return allows(GRAMMARS["thinking", special].grammar(by_schema(SCHEMA), None, inside), text, "thinking", special)

    assert may(f"I {{think}} 漢\n</think>\n\n{ANSWER}", inside=True)
    assert may(f"</think>{ANSWER}", inside=True)
    assert not may(ANSWER, inside=True)
    assert not may(f"I think</think>\n{ANSWER}.", inside=True)
    assert may(ANSWER, inside=False)
    assert may(f"<think>\nhm\n</think>\n\n{ANSWER}", inside=False)
    assert not may(f"hm</think>{ANSWER}", inside=False)


def strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}


@pytest.mark.parametrize(("name", "special"), [("qwen", False), ("thinking", True)])
def test_with_a_strict_tool_text_is_free_until_a_call_begins(name: str, special: bool) -> None:
    make = GRAMMARS[name, special].grammar(None, ToolOffer.of([strict(WEATHER), CLOCK]))

    def may(text: str) -> bool:
        return allows(make, text, name, special)

    thought = "<think>\nhm <é\n</think>\n\nyes "  # ends in separate tokens in one of the formats
    for free in ("", "a < b 漢\n", "<tool_cal", CALL, f"I see.\n{CALL}\nDone.", f"{CALL}{CALL}", f"{thought}{CALL}"):
        assert may(free), free
    for wrong in (
        CALL.replace("3", "10"),
        CALL.replace("Rome", "Bonn"),
        f"x {CALL.replace('get_', '')}",
        "<tool_call> b",
    ):
        assert not may(wrong), wrong
    clock = '<tool_call>\n{"name": "clock", "arguments": {"any": [1]}}\n</tool_call>'
    assert may(clock)  # not strict
    assert not may(clock.replace("[1]", "[1"))


def test_a_tag_cannot_be_spelled_past_the_grammar() -> None:
    make = GRAMMARS["qwen", False].grammar(None, ToolOffer.of([strict(WEATHER)]))
    assert make is not None
    vocab, grammar = tokenizer_of("qwen").get_vocab(), make()
    assert [grammar.advance(vocab[letter]) for letter in "<tool_call>"] == [True] * 10 + [False]


def test_bytes_that_are_not_text_are_free_too() -> None:
    make = GRAMMARS["qwen", False].grammar(None, ToolOffer.of([strict(WEATHER)]))
    assert make is not None
    vocab, grammar = tokenizer_of("qwen").get_vocab(), make()
    first, second = "é".encode()  # byte-level tokenizers write each byte as a character
    assert all(grammar.advance(vocab[chr(byte)]) for byte in (first, first, second, second))
    assert grammar.advance(vocab["a"])


def test_tags_that_are_plain_text_begin_calls_too() -> None:
    tags = format_of("qwen").calls
    assert tags is not None
    format = ChatFormat(tokenizer_of("plain"), AnswerStates(), tags)
    grammars = Grammars(format, VOCAB, [END])
    make = grammars.grammar(None, ToolOffer.of([strict(WEATHER)]))
    assert allows(make, f"I see.\n{CALL}\nDone.{CALL}")
    assert not allows(make, f"I see.\n{CALL.replace('3', '10')}")


def test_tools_that_are_not_strict_leave_the_answer_free() -> None:
    assert GRAMMARS["qwen", False].grammar(None, ToolOffer.of([WEATHER, CLOCK])) is None
    assert GRAMMARS["qwen", False].grammar(None, ToolOffer.of([strict(WEATHER)], "none")) is None


def test_the_schema_of_an_older_json_object_is_followed() -> None:
    make = compiled({"type": "json_object", "schema": SCHEMA})
    assert allows(make, ANSWER)
    assert not allows(make, ANSWER.replace("high", "higher"))
    assert not allows(compiled({"type": "json_object", "schema": {}}), "[1]")
    with pytest.raises(ConfigError, match=r"response_format\.schema: .*Invalid type: text"):
        GRAMMARS["plain", False].grammar({"type": "json_object", "schema": {"properties": {"a": {"type": "text"}}}})


def test_with_tools_and_a_schema_an_answer_is_either() -> None:
    make = compiled(by_schema(SCHEMA), ToolOffer.of([WEATHER], "auto"), name="qwen")
    assert allows(make, ANSWER, "qwen")
    assert allows(make, CALL, "qwen")
    assert not allows(make, f"{ANSWER}{CALL}", "qwen")
    assert not allows(compiled(by_schema(SCHEMA), ToolOffer.of([WEATHER], "required"), name="qwen"), ANSWER, "qwen")


@pytest.mark.parametrize(
    ("format", "reason"),
    [
        ({"type": "text", "schema": {}}, "unknown key 'schema'"),
        ({"type": "json_schema"}, "response_format.json_schema: must be an object"),
        (by_schema({"type": "text"}), "schema: Invalid type: text"),
        (by_schema({"type": "array", "uniqueItems": True}), "Unimplemented keys.*uniqueItems"),
        (by_schema({"properties": {"a": {"not": {}}}}), "Unimplemented keys.*not"),
        (by_schema({"x-guidance": {"lenient": True}, "not": {}}), "x-guidance"),
        (by_schema({"a": {"x-guidance": {"lenient": True}}, "if": {}}), "Unimplemented keys.*if"),
        (by_schema({"oneOf": [{"minimum": 1}, {"minimum": 2}]}), "oneOf constraints are not supported. Use anyOf"),
        (by_schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (by_schema({"type": "string", "pattern": "("}), "regex parse error"),
        (by_schema({"type": "string", "format": "colour"}), "Unknown format: colour"),
        (by_schema({"$ref": "http://localhost/schema"}), "localhost"),
        (by_schema({"enum": []}), "Unsatisfiable"),
        (by_schema({"type": "object", "properties": {"a": False}, "required": ["a"]}), "unsatisfiable"),
        (by_schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "no text fits this"),
        (by_schema({"type": "string", "pattern": "a?" * 20_000}), "too many expressions"),
        (by_schema({"enum": ["x" * MOST_SCHEMA_BYTES]}), "too large"),
    ],
)
def test_unsupported_schemas_are_refused_with_the_reason(format: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){reason}"):
        GRAMMARS["plain", False].grammar(format)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"anyOf": [schema]}
    return schema


def test_deep_schemas_are_refused_and_long_chains_compile() -> None:
    with pytest.raises(ConfigError, match="nested too deep"):
        compiled(by_schema(nested(20_000)))
    with pytest.raises(ConfigError, match="schema: recursion limit"):
        compiled(by_schema(nested(150)))
    assert allows(compiled(by_schema(nested(40))), '"a"')
    chain: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(1_300)}
    assert allows(compiled(by_schema({"$defs": {**chain, "d1300": {"type": "string"}}, "$ref": "#/$defs/d0"})), '"a"')


UNENFORCEABLE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "folder": {"type": "string", "format": "path"},
        "key": {"type": "string", "format": "password", "not": {"const": "x"}},
        "ids": {"type": "array", "uniqueItems": True, "contains": {"type": "integer"}, "maxItems": 2},
        "count": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        "share": {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
        "name": {"type": "string", "pattern": "(?=a)b"},
        "other": {"$ref": "https://example.com/schema"},
    },
    "required": ["count"],
    "propertyNames": {"pattern": "^[a-z]+$"},
    "if": {"required": ["ids"]},
    "then": {"required": ["key"]},
    "additionalProperties": False,
}


def test_what_a_grammar_cannot_enforce_is_left_out_of_tools_that_are_not_strict() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": UNENFORCEABLE}}
    make = compiled(None, ToolOffer.of([tool], "required"), name="qwen")
    call = CALL.replace("get_weather", "f")
    assert allows(make, call.replace('{"city": "Rome", "days": 3}', '{"count": 3}'), "qwen")
    assert not allows(make, call.replace('{"city": "Rome", "days": 3}', '{"count": "three"}'), "qwen")
    with pytest.raises(ConfigError, match="Unimplemented keys|Unknown format|Resource"):
        compiled(None, ToolOffer.of([strict(tool)], "required"), name="qwen")


def test_tools_that_are_too_large_for_a_grammar_are_still_called_by_name() -> None:
    large = {"type": "object", "properties": {"a": {"enum": ["x" * MOST_SCHEMA_BYTES]}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": large}}
    make = compiled(None, ToolOffer.of([tool, WEATHER], "required"), name="qwen")
    assert allows(make, CALL.replace("get_weather", "f"), "qwen")
    assert not allows(make, CALL.replace("get_weather", "g"), "qwen")
    with pytest.raises(ConfigError, match="too large"):
        compiled(None, ToolOffer.of([strict(tool)], "required"), name="qwen")


def test_an_unsupported_tool_schema_is_named() -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "text"}}}}}
    with pytest.raises(ConfigError, match=r"^tools\[1\]\.function\.parameters: Invalid type: text"):
        GRAMMARS["qwen", False].grammar(None, ToolOffer.of([WEATHER, bad], "required"))


def test_calls_that_are_not_json_between_tags_cannot_be_forced() -> None:
    mistral = Grammars.of(target_of("mistral"))
    with pytest.raises(ConfigError, match="^tool_choice: .*'mistral'"):
        mistral.grammar(None, ToolOffer.of([WEATHER], "required"))
    with pytest.raises(ConfigError, match="^response_format: .*'mistral'"):
        mistral.grammar({"type": "json_object"}, ToolOffer.of([WEATHER]))
    assert mistral.grammar({"type": "json_object"}, ToolOffer.of([WEATHER], "none")) is not None
    with pytest.raises(ConfigError, match="no parser"):
        GRAMMARS["plain", False].grammar(None, ToolOffer.of([WEATHER], "required"))


def test_targets_that_cannot_have_grammars_say_so() -> None:
    with pytest.raises(ConfigError, match="a token that ends the text"):
        Grammars(format_of("plain"), VOCAB, [VOCAB + 1]).grammar({"type": "json_object"})


def test_grammars_are_vetted_once_and_from_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    started, run = [], subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: started.append(args) or run(*args, **options))
    grammars = Grammars.of(target_of("plain"))
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: grammars.grammar(by_schema(SCHEMA)), range(16)))
    assert grammars.grammar(by_schema(SCHEMA)) is not None
    assert len(started) <= 4, "once, or once a thread if they come at the same moment"
    assert all(allows(make, ANSWER) for make in made)


def test_rows_do_not_share_a_state() -> None:
    make = compiled(by_schema(SCHEMA))
    first, second = make(), make()
    before = np.array(second.mask())
    for token in tokenizer_of("plain").encode('{"name":', add_special_tokens=False):
        assert first.advance(token)
    assert (np.array(second.mask()) == before).all()


@pytest.mark.parametrize("vocab", in_full([VOCAB, 4096, 1000], [VOCAB, 1000]))
def test_masks_are_as_wide_as_the_models_vocabulary(vocab: int) -> None:
    make = Grammars(format_of("plain"), vocab, [END]).grammar({"type": "json_object"})
    assert make is not None
    mask = np.array(make().mask())
    assert mask.shape == (vocab,)
    assert mask.dtype == np.bool_
    assert not mask[4096:].any()
    assert {tokenizer_of("plain").decode([int(token)])[0] for token in np.flatnonzero(mask)} == {"{"}


def fresh(make: Callable[[], Grammar], tokens: Sequence[int]) -> Grammar:
    grammar = make()
    for token in tokens:
        assert grammar.advance(token)
    return grammar


def masks_of(grammar: Grammar) -> Any:
    return np.array(grammar.mask())


@settings(max_examples=some(25))
@given(data=st.data())
def test_a_matcher_after_rollback_equals_a_new_one(data: st.DataObject) -> None:
    """With legal and illegal tokens, masks requested or not, and rollbacks of any length, also from after the end."""
    which = data.draw(st.sampled_from(["schema", "calls", "thinking"]))
    make = {
        "schema": lambda: compiled(by_schema(SCHEMA), name="thinking"),
        "calls": lambda: compiled(None, ToolOffer.of([WEATHER, CLOCK], "required"), name="thinking"),
        "thinking": lambda: compiled({"type": "json_object"}, None, True, name="thinking"),
    }[which]()
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    grammar, text = make(), list[int]()
    for _ in range(data.draw(st.integers(1, 60))):
        action = rng.random()
        if action < 0.2:
            count = int(rng.integers(0, len(text) + 1))
            grammar.rollback(count)
            del text[len(text) - count :]
        elif action < 0.35:
            token = int(rng.integers(VOCAB))
            if grammar.advance(token):
                text.append(token)
            else:
                assert token == END or not masks_of(fresh(make, text))[token]
        else:
            choices = np.flatnonzero(masks_of(grammar))
            token = int(rng.choice(choices))
            assert grammar.advance(token) == (token not in (0, END))
            text += [token] if token not in (0, END) else []
    assert (masks_of(grammar) == masks_of(fresh(make, text))).all()


def test_masks_for_a_draft_leave_the_matcher_unchanged() -> None:
    make = compiled(by_schema(SCHEMA))
    tokens = tokenizer_of("plain").encode(ANSWER, add_special_tokens=False)
    grammar = fresh(make, tokens[:4])
    before = masks_of(grammar)
    assert len(walk(grammar, tokens[4:12])) == 9
    assert len(walk(grammar, [*tokens[4:6], END, *tokens[6:8]])) == 3
    assert len(walk(grammar, [*tokens[4:], END])) == len(tokens[4:]) + 1
    assert (masks_of(grammar) == before).all()


def test_an_end_token_is_not_accepted() -> None:
    """Even if the text could continue: a number may end after each digit."""
    grammar = fresh(compiled(by_schema({"type": "integer"})), tokenizer_of("plain").encode("1"))
    before = masks_of(grammar)
    assert before[END]
    assert before.sum() > 1
    assert not grammar.advance(END)
    assert (masks_of(grammar) == before).all()


HANGS = {"type": "integer", "multipleOf": 99999999}


def test_endless_compiling_is_killed_and_affects_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_mlx.serve.chat.structured.COMPILE_SECONDS", 0.5)
    grammars = GRAMMARS["plain", False]
    # On a fast machine the memory limit may come first.
    with pytest.raises(ConfigError, match=r"schema: too complex: compiling it (takes more than 0\.5 s|needs)"):
        grammars.grammar(by_schema(HANGS))
    monkeypatch.setattr("eagle_mlx.serve.chat.structured.COMPILE_SECONDS", 60.0)
    assert allows(grammars.grammar(by_schema({"type": "integer", "multipleOf": 7})), "21")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux")
def test_grammars_that_need_too_much_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_mlx.serve.chat.structured.COMPILE_SECONDS", 60.0)
    monkeypatch.setattr("eagle_mlx.serve.chat.structured.MOST_MEMORY", 80 << 20)
    grammars = Grammars.of(target_of("plain"))
    with pytest.raises(ConfigError, match="too complex: compiling it needs more than 80 MB"):
        grammars.grammar(by_schema(HANGS))
    assert allows(grammars.grammar(by_schema(SCHEMA)), ANSWER)


HUNGRY = {"type": "string", "pattern": "^((a{1000}){1000}){100}$"}


@pytest.mark.parametrize("schema", [HUNGRY, {"type": "object", "properties": {"a": HUNGRY}, "required": ["a"]}])
def test_a_text_without_a_choice_is_not_computed_ahead(schema: Any) -> None:
    """It has 100 million letters. Computing all of them takes minutes and gigabytes."""
    grammar = compiled(by_schema(schema))()
    begun = '"aaaa' if schema is HUNGRY else '{"a":"aaaa'
    for token in tokenizer_of("plain").encode(begun, add_special_tokens=False):
        assert grammar.advance(token)
    allowed = tokenizer_of("plain").convert_ids_to_tokens(np.flatnonzero(masks_of(grammar)).tolist())
    assert all(set(text) == {"a"} for text in allowed)


def until_it_fails(grammar: Grammar) -> None:
    rng = np.random.default_rng(0)
    while grammar.advance(int(rng.choice(np.flatnonzero(masks_of(grammar))))):
        pass


def test_a_row_that_reaches_the_lexer_limit_does_not_change_the_grammar() -> None:
    """llguidance's copies of a matcher share a lexer, and so a limit that one of them has reached."""
    make = compiled(by_schema({"type": "string", "pattern": ".{0,200}(a|e).{0,200}(t|s).{0,200}(red|blue)"}))
    begun = fresh(make, tokenizer_of("plain").encode('"at', add_special_tokens=False))
    for _ in range(2):
        with pytest.raises(ConfigError, match="the text cannot follow it any further: lexer error"):
            until_it_fails(make())
        assert allows(make, '"atred"')
    assert begun.advance(tokenizer_of("plain").encode("red", add_special_tokens=False)[0])
