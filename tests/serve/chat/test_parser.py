"""Parsed answers: calls, reasoning and text, returned as soon as they are certain, however the text is cut."""

from __future__ import annotations

import itertools
import json
import pkgutil
import re
from collections.abc import Callable, Sequence
from typing import Any

import mlx_lm.tool_parsers
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

import eagle_mlx as em
from eagle_mlx.serve.chat import AnswerParser, ChatFormat, Delta, ToolOffer
from eagle_mlx.serve.chat.tools import AnswerStates
from tests.fakes import plain_tokenizer
from tests.serve.chat.formats import CLOCK, WEATHER, format_of, format_with_parser, format_with_template, target_of
from tests.serve.chat.test_call_formats import CALLING, Calls
from tests.serve.chat.test_call_formats import format_of as call_format_of

TOOLS = [WEATHER, CLOCK]
ROME = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
NOW = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
Piece = tuple[str, Any]


def told(deltas: Sequence[Delta]) -> list[Piece]:
    """Join deltas, so that their number does not matter."""
    out: list[Piece] = []
    for delta in deltas:
        assert (delta.content != "") + (delta.reasoning != "") + (delta.tool_call is not None) == 1
        if delta.tool_call is not None:
            call = delta.tool_call
            out.append(("call", (call.index, call.name, json.loads(call.arguments))))
            continue
        kind = "reasoning" if delta.reasoning else "content"
        text = delta.reasoning or delta.content
        if out and out[-1][0] == kind:
            text = out.pop()[1] + text
        out.append((kind, text))
    return out


def read(
    format: ChatFormat, *parts: str, tools: Any = TOOLS, inside: bool = False, complete: bool = True
) -> list[Piece]:
    reader = AnswerParser(format, ToolOffer.of(tools), inside)
    deltas = [delta for part in parts for delta in reader.push(part)]
    return told([*deltas, *reader.finish(complete)])


def rome(index: int = 0) -> Piece:
    return ("call", (index, "get_weather", {"city": "Rome", "days": 2}))


def test_text_passes_at_once_and_half_a_tag_waits() -> None:
    reader = AnswerParser(format_of("qwen"), ToolOffer.of(TOOLS))
    steps = [
        "Let me ",
        "look.",
        "\n",
        "<tool",
        "_box> or",
        " <tool_call",
        ">\n{",
        '"name": "clock"',
        "}</tool_call",
        ">",
    ]
    shown = [told(reader.push(step)) for step in steps]
    say = [[("content", text)] for text in ("Let me ", "look.", "\n<tool_box> or", " ")]
    assert shown == [say[0], say[1], [], [], say[2], say[3], [], [], [], [("call", (0, "clock", {}))]]
    assert reader.finish() == []


def test_line_breaks_around_tags_are_dropped() -> None:
    assert read(format_of("qwen"), f"Hi.\n\n{ROME}\n{NOW}\n") == [
        ("content", "Hi."),
        rome(),
        ("call", (1, "clock", {})),
    ]
    assert read(format_of("thinking"), "<think>\n\na\n\nb\n</think>\n\nHi\n") == [
        ("reasoning", "a\n\nb"),
        ("content", "Hi\n"),
    ]
    assert read(format_of("thinking"), "<think>\n\n</think>\n\nHi") == [("content", "Hi")]
    assert read(format_of("plain"), "\n\nHi\n\n") == [("content", "\n\nHi\n\n")]


def test_ids_are_unique_and_fit_the_template() -> None:
    reader = AnswerParser(format_of("qwen"), ToolOffer.of(TOOLS))
    ids = [delta.tool_call.id for delta in reader.push(ROME + NOW) if delta.tool_call]
    assert len(set(ids)) == 2
    assert all(re.fullmatch("call_[0-9a-f]{24}", call_id) for call_id in ids)
    mistral = AnswerParser(format_of("mistral"), ToolOffer.of(TOOLS))
    mistral.push("[TOOL_CALLS]clock[ARGS]{}")
    assert [
        re.fullmatch("[A-Za-z0-9]{9}", delta.tool_call.id) is None for delta in mistral.finish() if delta.tool_call
    ] == [False]


def test_without_tools_nothing_is_a_call() -> None:
    assert read(format_of("qwen"), ROME, tools=[]) == [("content", ROME)]
    assert read(format_of("plain"), ROME) == [("content", ROME)]


@pytest.mark.parametrize(
    "body",
    [
        "{",
        "",
        "[]",
        "3",
        '{"name": "no name", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "clock", "arguments": [1]}',
        '{"name": "clock", "arguments": "no JSON"}',
        '{"name": "clock", "arguments": {"x": NaN}}',
        '{"name": "clock", "zone": "CET"}',
        '{"name": "clock", "arguments": {}, "zone": "CET"}',
        '{"name": "clock", "arguments": {}, "parameters": {"zone": "CET"}}',
        '{"name": "clock", "arguments": {"zone": "CET", "zone": "UTC"}}',
        "[" * 100_000,
    ],
)
def test_a_malformed_call_is_text(body: str) -> None:
    text = f"a\n<tool_call>\n{body}\n</tool_call>\nb"
    assert read(format_of("qwen"), text) == [("content", text)]
    assert read(format_of("qwen"), f"a\n<tool_call>\n{body}\n</tool_call>\n", ROME)[1:] == [rome()]


def test_arguments_are_json_that_utf8_can_encode() -> None:
    def arguments(text: str) -> str:
        deltas = AnswerParser(format_of("qwen"), ToolOffer.of(TOOLS)).push(
            f'<tool_call>{{"name": "clock", "arguments": {text}}}</tool_call>'
        )
        assert deltas[0].tool_call is not None
        return deltas[0].tool_call.arguments

    assert arguments('{"a": "Z\\u00fcrich 😀"}') == '{"a": "Zürich 😀"}'
    assert arguments('{"a": "\\ud800"}') == '{"a": "\ufffd"}'
    assert arguments('"{\\"a\\": 1}"') == '{"a": 1}'
    assert arguments("null") == "{}"
    assert json.loads(arguments('{"a": "</tool_call"}')) == {"a": "</tool_call"}


CUT = {
    **{"json_tools": '<tool_call>\n{"name": "clock", "arguments": {', "gemma4": "<|tool_call>call:get"},
    "glm47": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_k",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city"',
    "minicpm5": '<function name="get_weather"><param name="city">Ro',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n',
    "mistral": "[TOOL_CALLS]",
    "pythonic": '<|tool_call_start|>[get_weather(city="Ro',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n",
}


@pytest.mark.parametrize("parser", CUT)
def test_the_fragment_of_a_call_that_was_cut_short_is_dropped(parser: str) -> None:
    format, text = format_with_parser(parser), f"I look.\n{CUT[parser]}"
    expected = [("content", "I look.")]
    assert read(format, text, complete=False) == read(format, *text, complete=False) == expected
    whole = [("content", "I look."), rome()]
    assert read(format, f"I look.\n{SAMPLES[parser]}\n{CUT[parser]}", complete=False, tools=[ASKED, CLOCK]) == whole


@pytest.mark.parametrize(("name", "writer"), CALLING)
def test_no_markup_stays_of_a_call_that_was_cut_in_its_opening(name: str, writer: Callable[[Calls], str]) -> None:
    text = f"I look.\n{writer([('get_weather', {'city': 'Rome'})])}"
    format, start = call_format_of(name), text.index("get_weather") - 1
    for end in range(start, len(text)):
        pieces = read(format, text[:end], complete=False)
        content = "".join(value for kind, value in pieces if kind == "content")
        assert len(re.sub(r"```\w*|\n", "", content.removeprefix("I look."))) < 6


def test_the_first_characters_of_a_tag_are_kept_if_the_text_is_cut_short() -> None:
    assert read(format_of("qwen"), "if x <to", complete=False) == [("content", "if x <to")]
    assert read(format_of("qwen"), "They write <tool_ca") == [("content", "They write <tool_ca")]


@pytest.mark.parametrize("tool", ["python", "browser.search"])
@pytest.mark.parametrize(
    "header", ["<|channel|>analysis to=TOOL code", " to=TOOL<|channel|>commentary <|constrain|>code"]
)
def test_messages_to_tools_that_the_server_does_not_have_are_dropped(tool: str, header: str) -> None:
    message = f"{header.replace('TOOL', tool)}<|message|>print(1)<|call|>"
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    assert read(call_format_of("gpt-oss"), thought + message) == [("reasoning", "hm")]
    assert read(call_format_of("gpt-oss"), *message) == []


def test_text_that_mentions_a_tag_is_kept_if_it_is_cut_short() -> None:
    text = "They write <tool_call> for it, then"
    assert read(format_of("qwen"), text, complete=False) == read(format_of("qwen"), *text, complete=False)
    assert read(format_of("qwen"), text, complete=False) == [("content", text)]


def test_the_complete_calls_of_a_section_that_was_cut_short_are_kept() -> None:
    first = SAMPLES["kimi_k2"].removesuffix("<|tool_calls_section_end|>")
    text = f"{first}<|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{{"
    format = format_with_parser("kimi_k2")
    assert read(format, text, complete=False, tools=[ASKED]) == [rome()]
    assert read(format, *text, complete=False, tools=[ASKED]) == [rome()]


def test_the_end_of_text_may_replace_the_end_tag() -> None:
    assert read(format_of("qwen"), ROME.removesuffix("</tool_call>")) == [rome()]


def test_tags_without_a_call_cost_little() -> None:
    text = "[TOOL_CALLS]" * 20_000
    assert read(format_of("mistral"), text) == [("content", text)]
    text = "<tool_call>" * 20_000 + "</tool_call>"
    assert read(format_of("qwen"), text) == [("content", text)]


@pytest.mark.parametrize("parser", ["json_tools", "qwen3_coder"])
def test_a_value_may_hold_many_end_tags(parser: str) -> None:
    city = "x</tool_call>" * 200
    text = SAMPLES[parser].replace("Rome", city)
    [(_, (_, _, arguments))] = read(format_with_parser(parser), text, tools=[ASKED])
    assert arguments == {"city": city, "days": 2}


SAMPLES = {
    "json_tools": ROME,
    "laguna": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value>\n"
    "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
    "longcat": "<longcat_tool_call>get_weather<longcat_arg_key>city</longcat_arg_key><longcat_arg_value>Rome"
    "</longcat_arg_value><longcat_arg_key>days</longcat_arg_key><longcat_arg_value>2</longcat_arg_value>"
    "</longcat_tool_call>",
    "function_gemma": "<start_function_call>call:get_weather{city:<escape>Rome<escape>,days:2}<end_function_call>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Rome", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>json type="object"<|sep|>'
    '{"city": "Rome", "days": 2}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "minicpm5": '<function name="get_weather"><param name="city">Rome</param><param name="days">2</param></function>',
    "minimax_m2": '<minimax:tool_call><invoke name="get_weather"><parameter name="city">Rome</parameter>'
    '<parameter name="days">2</parameter></invoke></minimax:tool_call>',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 2}',
    "muse_spark": '<atem:function_calls><atem:invoke name="get_weather"><atem:parameter name="city">"Rome"'
    '</atem:parameter><atem:parameter name="days">2</atem:parameter></atem:invoke></atem:function_calls>',
    "pythonic": '<|tool_call_start|>[get_weather(city="Rome", days=2)]<|tool_call_end|>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
}
SAMPLES["glm47"] = SAMPLES["laguna"]
ASKED = {
    **WEATHER,
    "function": {
        **WEATHER["function"],
        "parameters": {
            "properties": {  # type: ignore[dict-item]
                "city": {"type": "string"},
                "days": {"type": "integer"},
            }
        },
    },
}


@pytest.mark.parametrize("parser", sorted(module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)))
def test_the_calls_of_every_parser_of_mlx_lm_are_read(parser: str) -> None:
    format, text = format_with_parser(parser), f"I look.\n{SAMPLES[parser]}"
    expected = [("content", "I look."), rome()]
    assert read(format, text, tools=[ASKED]) == expected
    assert read(format, *text, tools=[ASKED]) == expected
    assert read(format, text, text[8:], tools=[ASKED]) == [*expected, rome(1)]


@pytest.mark.parametrize("parser", sorted(SAMPLES))
def test_a_made_up_function_is_a_call_and_a_withheld_one_is_text(parser: str) -> None:
    format = format_with_parser(parser)
    for name in ("look_up", "web.Search2"):
        text = f"I look.\n{SAMPLES[parser].replace('get_weather', name)}\nAnd on."
        for parts in ([text], text):
            [before, (kind, (_, called, arguments)), *_] = read(format, *parts, tools=[CLOCK])
            assert (before, kind, called) == (("content", "I look."), "call", name)
            assert arguments["city"] == "Rome"
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CLOCK]}}
    reader = AnswerParser(format, ToolOffer.of([WEATHER, CLOCK], allowed))
    deltas = [*reader.push(f"I look.\n{SAMPLES[parser]}"), *reader.finish()]
    assert "".join(delta.content for delta in deltas) == f"I look.\n{SAMPLES[parser]}"


TYPES: dict[str, tuple[dict[str, Any], str, Any]] = {
    "a reference": ({"$ref": "#/$defs/days"}, "3", 3),
    "a reference to text": ({"$ref": "#/$defs/a~1b"}, "3", "3"),
    "int or null": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
    "text or null": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "3", "3"),
    "text or null, as a list": ({"type": ["string", "null"]}, "3", "3"),
    "null": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
    "all of": ({"allOf": [{"description": "x"}, {"$ref": "#/$defs/days"}]}, "3", 3),
    "numbers": ({"enum": [1, 3]}, "3", 3),
    "texts": ({"enum": ["1", "3"]}, "3", "3"),
    "a constant": ({"const": True}, "true", True),
    "a reference to itself": ({"$ref": "#/$defs/loop"}, "x", "x"),
    "null in a text": ({"type": "string"}, "null", "null"),
    "a large integer": ({"type": "integer"}, "12345678901234567890", 12345678901234567890),
    "a whole number": ({"type": "integer"}, "3.0", 3),
    "no integer": ({"type": "integer"}, "about three", "about three"),
    "no number": ({"type": "number"}, "", ""),
    "a list in Python": ({"type": "array"}, "['a', True]", ["a", True]),
    "no object": ({"type": "object"}, "[1]", "[1]"),
    "a type of Python": ({"type": "int"}, "3", 3),
    "nothing known": ({"$ref": "#/$defs/none"}, "x", "x"),
}
DEFS = {"days": {"type": "integer"}, "a/b": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}


@pytest.mark.parametrize("case", TYPES)
def test_arguments_without_quotes_get_the_type_of_any_schema(case: str) -> None:
    schema, written, value = TYPES[case]
    parameters = {"properties": {"days": schema}, "$defs": DEFS}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    text = f"<tool_call>\n<function=get_weather>\n<parameter=days>\n{written}\n</parameter>\n</function>\n</tool_call>"
    [(_, (_, _, arguments))] = read(format_with_parser("qwen3_coder"), text, tools=tools)
    assert arguments == {"days": value}
    assert type(arguments["days"]) is type(value)


def test_a_models_own_ids_are_kept() -> None:
    reader = AnswerParser(format_with_parser("kimi_k2"), ToolOffer.of(TOOLS))
    assert [delta.tool_call.id for delta in reader.push(SAMPLES["kimi_k2"]) if delta.tool_call] == [
        "functions.get_weather:0"
    ]


def test_an_id_that_a_model_writes_twice_in_an_answer_counts_once() -> None:
    reader = AnswerParser(format_of("qwen"), ToolOffer.of(TOOLS))
    twice = '<tool_call>\n{"id": "1", "name": "clock", "arguments": {}}\n</tool_call>\n' * 2
    ids = [delta.tool_call.id for delta in [*reader.push(twice), *reader.finish()] if delta.tool_call]
    assert ids[0] == "1"
    assert re.fullmatch("call_[0-9a-f]{24}", ids[1])
    mistral = AnswerParser(format_of("mistral"), ToolOffer.of(TOOLS))
    mistral.push('[TOOL_CALLS][{"name": "clock", "id": "abcdefghi"}, {"name": "clock", "id": "abcdefghi"}]')
    assert len({delta.tool_call.id for delta in mistral.finish() if delta.tool_call}) == 2


def test_a_call_without_an_end_tag_ends_with_the_next_call_or_the_text() -> None:
    reader = AnswerParser(format_of("mistral"), ToolOffer.of(TOOLS))
    assert told(reader.push("x[TOOL_CALLS]clock[ARGS]{}")) == [("content", "x")]
    assert told(reader.push('[TOOL_CALLS]get_weather[ARGS]{"city": "[TOOL_CALLS]')) == [("call", (0, "clock", {}))]
    assert told(reader.push('"}')) == []
    assert told(reader.finish()) == [("call", (1, "get_weather", {"city": "[TOOL_CALLS]"}))]


def test_thoughts_of_prompts_that_open_them() -> None:
    reader = AnswerParser(format_of("thinking"), ToolOffer.of(TOOLS), starts_in_reasoning=True)
    assert told(reader.push("\nhm")) == [("reasoning", "hm")]
    assert told(reader.push("m</th")) == [("reasoning", "m")]
    assert told(reader.push("ing>\n")) == [("reasoning", "</thing>")]
    assert told(reader.push("so</think>\n\n")) == [("reasoning", "\nso")]
    assert told(reader.push(f"Yes. {NOW}")) == [("content", "Yes. "), ("call", (0, "clock", {}))]
    assert read(format_of("thinking"), "no end", inside=True) == [("reasoning", "no end")]


def test_thoughts_that_the_model_opens() -> None:
    assert read(format_of("thinking"), " \n<think>hm</think>Yes") == [("reasoning", "hm"), ("content", "Yes")]
    assert read(format_of("qwen"), "<think>hm</think>Yes") == [("content", "<think>hm</think>Yes")]
    assert read(format_of("thinking"), " yes") == [("content", " yes")]
    assert read(format_of("thinking"), "<thin") == [("content", "<thin")]


@pytest.mark.parametrize("tags", [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")])
@pytest.mark.parametrize("place", ["template", "vocabulary"])
def test_tags_of_thoughts_come_from_the_template_or_the_vocabulary(tags: tuple[str, str], place: str) -> None:
    template = "[TOOL_CALLS]" + "".join(tags if place == "template" else ())
    format = format_with_template(template, tags if place == "vocabulary" else ())
    thought = "I could write [TOOL_CALLS]clock[ARGS]{} here"
    text = f"{tags[0]}{thought}{tags[1]}It is noon."
    expected = [("reasoning", thought), ("content", "It is noon.")]
    assert read(format, text) == read(format, *text) == expected


def test_a_thought_opens_again_after_a_thought_a_call_or_a_line_break() -> None:
    format = format_of("thinking")
    text = f"<think>a</think>\n<think>b</think>Yes.\n<think>c</think>{NOW}\n<think>d</think>Done."
    expected = [
        *(("reasoning", "ab"), ("content", "Yes."), ("reasoning", "c"), ("call", (0, "clock", {}))),
        *(("reasoning", "d"), ("content", "Done.")),
    ]
    assert read(format, text) == read(format, *text) == expected


def test_a_call_that_a_thought_only_mentions_is_reasoning() -> None:
    thought, format = f"I could write {NOW} but I do not.", format_of("thinking")
    text = f"{thought}</think>No."
    expected = [("reasoning", thought), ("content", "No.")]
    assert read(format, text, inside=True) == read(format, *text, inside=True) == expected


@pytest.mark.parametrize("after", ["", "</think>", "\n</think>\n\n"])
def test_a_call_in_a_thought_without_text_after_it_is_made(after: str) -> None:
    text, format = f"I call\n{NOW}\n{ROME}{after}", format_of("thinking")
    expected = [("reasoning", "I call"), ("call", (0, "clock", {})), rome(1)]
    assert read(format, text, inside=True) == read(format, *text, inside=True) == expected


def test_a_function_without_tags_around_it_is_a_call_at_the_beginning_of_a_line() -> None:
    format, call = format_with_parser("qwen3_coder"), SAMPLES["qwen3_coder"].removeprefix("<tool_call>\n")
    for written in (call, call.removesuffix("\n</tool_call>")):
        text = f"I look.\n\n{written}"
        assert (
            read(format, text, tools=[ASKED]) == read(format, *text, tools=[ASKED]) == [("content", "I look."), rome()]
        )
    for text in (f"They write {call}", call.replace("get_weather", "unknown")):
        assert read(format, text, tools=[ASKED]) == read(format, *text, tools=[ASKED]) == [("content", text)]


def test_each_function_in_the_same_tags_is_a_call() -> None:
    first_call = SAMPLES["qwen3_coder"].removesuffix("\n</tool_call>")
    text = f"{first_call}\n<function=clock>\n</function>\n</tool_call>"
    expected = [rome(), ("call", (1, "clock", {}))]
    format = format_with_parser("qwen3_coder")
    assert read(format, text, tools=[ASKED, CLOCK]) == read(format, *text, tools=[ASKED, CLOCK]) == expected


def test_functions_without_tags_of_their_own_are_calls_too() -> None:
    first_call = SAMPLES["glm47"].removesuffix("</tool_call>")
    key = "\n<arg_key>zone</arg_key>\n<arg_value>CET</arg_value>\n"
    format = format_with_parser("glm47")
    for more, arguments in ((f"\nclock{key}", {"zone": "CET"}), ("\nclock\n", {})):
        text = f"{first_call}{more}</tool_call>"
        expected = [rome(), ("call", (1, "clock", arguments))]
        assert read(format, text, tools=[ASKED, CLOCK]) == read(format, *text, tools=[ASKED, CLOCK]) == expected


@pytest.mark.parametrize(
    ("line", "days"), [("\n<parameter=days>\n", 2), ("<parameter=days>", None), ("\n<parameter=other>\n", None)]
)
def test_a_parameter_without_an_end_tag_ends_at_the_next_or_the_call_is_text(line: str, days: int | None) -> None:
    text = (
        f"<tool_call>\n<function=get_weather>\n<parameter=city>\nRome{line}2\n</parameter>\n</function>\n</tool_call>"
    )
    format = format_with_parser("qwen3_coder")
    expected = [rome()] if days else [("content", text)]
    assert read(format, text, tools=[ASKED]) == read(format, *text, tools=[ASKED]) == expected


def test_the_last_function_of_an_answer_may_lack_its_end_tag() -> None:
    text, format = SAMPLES["qwen3_coder"].replace("</function>\n", ""), format_with_parser("qwen3_coder")
    assert read(format, text, tools=[ASKED]) == read(format, *text, tools=[ASKED]) == [rome()]
    assert read(format, text, tools=[ASKED], complete=False) == []


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("gemma4", '<|tool_call>call:clock{zone:<|"|>CET<|"|>,zone:<|"|>UTC<|"|>}<tool_call|>'),
        ("kimi_k2", SAMPLES["kimi_k2"].replace('"days"', '"city"')),
        ("mistral", '[TOOL_CALLS][{"name": "clock", "zone": "CET"}]'),
        ("mistral", '[TOOL_CALLS]clock[ARGS]{"zone": "CET", "zone": "UTC"}'),
        ("pythonic", "<|tool_call_start|>[clock(zone='CET', zone='UTC')]<|tool_call_end|>"),
        ("qwen3_coder", SAMPLES["qwen3_coder"].replace("=days>", "=city>")),
    ],
)
def test_a_call_with_an_argument_twice_or_outside_of_the_arguments_is_text(parser: str, text: str) -> None:
    format = format_with_parser(parser)
    assert read(format, text, tools=[ASKED, CLOCK]) == read(format, *text, tools=[ASKED, CLOCK]) == [("content", text)]


def test_a_failed_call_makes_no_call_of_the_calls_in_its_values() -> None:
    inner = "<tool_call>\n<function=clock>\n</function>\n</tool_call>"
    text = f"<tool_call>\n<function=get_weather>\nx\n<parameter=city>\n{inner}\n</parameter>\n</function>\n</tool_call>"
    format = format_with_parser("qwen3_coder")
    assert read(format, text, tools=[ASKED, CLOCK]) == read(format, *text, tools=[ASKED, CLOCK]) == [("content", text)]


def test_think_tags_inside_text_do_not_begin_a_thought() -> None:
    text = "Models write <think> before and </think> behind."
    assert read(format_of("thinking"), text) == [("content", text)]
    assert read(format_of("thinking"), f"<think>a</think>{text}") == [("reasoning", "a"), ("content", text)]


def test_a_call_ends_a_thought_and_the_end_of_a_thought_ends_a_call() -> None:
    format = format_of("thinking")
    assert read(format, f"I call\n{NOW}Done.", inside=True) == [
        ("reasoning", "I call"),
        ("call", (0, "clock", {})),
        ("content", "Done."),
    ]
    reader = AnswerParser(format, ToolOffer.of(TOOLS), starts_in_reasoning=True)
    assert told(reader.push("they write <tool_call> for it. ")) == [("reasoning", "they write <tool_call> for it. ")]
    assert told(reader.push('<tool_call>{"name": ')) == []
    assert told(reader.push("</think>So: ")) == [("reasoning", '<tool_call>{"name": '), ("content", "So: ")]
    in_arguments = '<tool_call>{"name": "clock", "arguments": {"a": "</think>"}}</tool_call>'
    assert read(format, "<think>a</think>", in_arguments)[1:] == [("call", (0, "clock", {"a": "</think>"}))]


def test_templates_with_their_own_states() -> None:
    """Headers and tags that only structure an answer are dropped."""
    marks = AnswerStates(
        edges={
            "header": [("to=self|", "reasoning"), ("to=user|", "content")],
            "reasoning": [("|eom|", "header")],
            "content": [("|eom|", "header"), ("|shape|", "content")],
        },
        initial="header",
    )
    format = ChatFormat(format_of("plain").tokenizer, marks, None)
    text = "assistant to=self|hm|eom|assistant to=user|Y|shape|es|eom|"
    assert read(format, text) == read(format, *text) == [("reasoning", "hm"), ("content", "Yes")]


def test_tags_of_mlx_lms_formats_come_from_the_tokenizer() -> None:
    tokenizer = TokenizerWrapper(
        plain_tokenizer(),
        response_format={
            "initial_state": "header",
            "transitions": {"header": [("to=user|", "normal"), ("call|", "tool")]},
        },
    )
    target = em.Target(target_of("qwen").model, tokenizer)
    marks = ChatFormat.of(target).thoughts
    assert (marks.initial, marks.edges["header"]) == ("header", [("to=user|", "content")])


WORDS = [
    "a",
    "\n",
    "<",
    "<tool_call>",
    "</tool_call>",
    "<tool_",
    "call>",
    "<think>",
    "</think>",
    "</thi",
    "nk>",
    "{}",
    " ",
]
texts = st.lists(st.sampled_from([*WORDS, ROME, NOW, ROME.replace("get", "got")]), max_size=12).map("".join)


@given(text=texts, cuts=st.lists(st.integers(0, 400), max_size=12), inside=st.booleans(), complete=st.booleans())
@example("<tool_call>a</think><tool_call>", [3, 11, 14], True, True)
def test_the_result_does_not_depend_on_how_the_text_is_cut(
    text: str, cuts: list[int], inside: bool, complete: bool
) -> None:
    places = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    parts = [text[a:b] for a, b in itertools.pairwise(places)]
    format = format_of("thinking")
    whole = read(format, text, inside=inside, complete=complete)
    assert read(format, *parts, inside=inside, complete=complete) == whole
    assert read(format, *text, inside=inside, complete=complete) == whole


@given(
    text=st.lists(st.sampled_from(["[TOOL_CALLS]", "clock[ARGS]{}", "[", "a", "\n", 'clock[ARGS]{"x": "']), max_size=9)
)
def test_the_result_does_not_depend_on_cuts_if_calls_have_no_end(text: list[str]) -> None:
    format, whole = format_of("mistral"), "".join(text)
    assert read(format, *whole) == read(format, whole) == read(format, *text)


def bare(text: str) -> str:
    """Return a text without line breaks, think tags in any combination, and leading spaces."""
    text = text.replace("\n", "").lstrip()
    while (less := text.replace("<think>", "").replace("</think>", "").lstrip()) != text:
        text = less
    return text


@given(text=texts, inside=st.booleans())
def test_no_text_is_lost_or_reordered(text: str, inside: bool) -> None:
    calls = {"get_weather": ROME, "got_weather": ROME.replace("get", "got"), "clock": NOW}
    pieces = read(format_of("thinking"), text, inside=inside)
    assert bare("".join(calls[value[1]] if kind == "call" else value for kind, value in pieces)) == bare(text)
