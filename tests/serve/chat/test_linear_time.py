"""Work on clients' texts takes linear time, because it holds the interpreter lock while others wait."""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time
from typing import Any

import pytest

from eagle_mlx.serve.api.conversation import Turns
from eagle_mlx.serve.api.media import Pictures
from eagle_mlx.serve.chat import AnswerParser, ToolOffer
from eagle_mlx.serve.chat.template import without_billing_header
from tests.serve.chat.formats import WEATHER, format_with_parser

HEADER = "x-anthropic-billing-header: a="


def is_linear(work: Callable[[int], Any], size: int) -> bool:
    """Return whether ten times the size takes less than 40 times as long; quadratic time would be 100 times."""

    def seconds(size: int) -> float:
        began = thread_time()
        work(size)
        return thread_time() - began

    short = min(seconds(size) for _ in range(3))
    return min(seconds(10 * size) for _ in range(2)) < 40 * max(short, 5e-4)


@pytest.mark.parametrize("end", ["", "cch=1;"])
def test_a_system_prompt_of_headers_takes_linear_time(end: str) -> None:
    """The long one has 200 KB, and took 6.6 s."""

    def leave_out(count: int) -> None:
        text = HEADER * count + end
        assert without_billing_header([{"role": "system", "content": text}])[0]["content"] == text

    assert is_linear(leave_out, 700)


@pytest.mark.parametrize(
    "add", [lambda c, t: c.say("user", t), lambda c, t: c.say("assistant", t), lambda c, t: c.think(t)]
)
def test_a_message_of_many_blocks_takes_linear_time(add: Callable[[Turns, str], None]) -> None:
    def join(count: int) -> None:
        conversation = Turns(Pictures())
        for _ in range(count):
            add(conversation, "abcdefgh")
        assert len(conversation.messages) == 1

    assert is_linear(join, 20_000)


@pytest.mark.parametrize(
    ("parser", "answer"),
    [
        ("gemma4", "<|tool_call>call:f{x<tool_call|>"),
        ("gemma4", "<|tool_call>call:get_weather{x<tool_call|>"),
        ("function_gemma", "<start_function_call>call:f{x<end_function_call>"),
    ],
)
@pytest.mark.parametrize("body", ["call:f{", "{}"])
def test_calls_without_an_end_take_linear_time(parser: str, answer: str, body: str) -> None:
    """A schema can force a model to write them. The long ones took up to 19 s."""
    format = format_with_parser(parser)

    def parse(count: int) -> None:
        reader = AnswerParser(format, ToolOffer.of([WEATHER]))
        text = answer.replace("x", body * count)
        deltas = [*reader.push(text), *reader.finish()]
        assert "".join(delta.content for delta in deltas) == text

    assert is_linear(parse, 400)


@pytest.mark.parametrize(
    ("parser", "answer", "body"),
    [
        ("kimi_k3", "<|open|>tools<|sep|>x<|close|>tools<|sep|>", "<|open|>call"),
        ("kimi_k3", "<|open|>tools<|sep|>x<|close|>tools<|sep|>", "<|open|>call <|sep|><|open|>argument"),
        ("kimi_k2", "<|tool_calls_section_begin|>x:0<|tool_calls_section_end|>", "  \n " * 4),
        ("muse_spark", "<atem:function_calls>x</atem:function_calls>", "<atem:invoke "),
        ("glm47", "<tool_call>f<arg_key>x</arg_value></tool_call>", "</arg_key><arg_key>"),
        ("longcat", "<longcat_tool_call>fx</longcat_tool_call>", "<longcat_arg_key></longcat_arg_key>"),
    ],
)
def test_tags_without_an_end_take_linear_time(parser: str, answer: str, body: str) -> None:
    """The long ones took 1 to 30 s."""
    format = format_with_parser(parser)

    def parse(count: int) -> None:
        reader = AnswerParser(format, ToolOffer.of([WEATHER]))
        text = answer.replace("x", body * count)
        assert "".join(delta.content for delta in [*reader.push(text), *reader.finish()]) == text

    assert is_linear(parse, 200)


@pytest.mark.parametrize(
    "body", ["</parameter> ", "<parameter=city> ", "</parameter>\n</function> ", "</tool_call>", "\n<function=clock>"]
)
def test_a_value_of_tags_takes_linear_time(body: str) -> None:
    def parse(count: int) -> None:
        text = f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{body * count}\n</parameter>\n</function>"
        reader = AnswerParser(format_with_parser("qwen3_coder"), ToolOffer.of([WEATHER]))
        assert [*reader.push(f"{text}\n</tool_call>"), *reader.finish()]

    assert is_linear(parse, 1000)


def test_calls_of_gemma_4_with_braces_in_texts_are_read() -> None:
    reader = AnswerParser(format_with_parser("gemma4"), ToolOffer.of([WEATHER]))
    deltas = reader.push('<|tool_call>call:get_weather{city:<|"|>{{}}}{<|"|>,more:{a:1}}<tool_call|>')
    assert [delta.tool_call.arguments for delta in deltas if delta.tool_call] == [
        '{"city": "{{}}}{", "more": {"a": 1}}'
    ]
