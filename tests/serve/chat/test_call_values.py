"""Arguments of calls: any text comes back as it was written, in its type, or the call is text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from eagle_mlx.serve.chat import AnswerParser, ToolOffer
from tests.full import some
from tests.serve.chat.test_call_formats import CALLING, Calls, format_of

END_TAGS = [
    *("</parameter>", "</function>", "</tool_call>", "</arg_value>", "</arg_key>", "</invoke>", "</param>"),
    *("</minimax:tool_call>", "</atem:parameter>", "</atem:invoke>", "</atem:function_calls>", "<tool_call|>"),
    *(f"<|close|>{name}<|sep|>" for name in ("argument", "call", "tools", "json")),
    *("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|call|>", "<|end|>", "[TOOL_CALLS]", "<|python_end|>"),
    *("</longcat_arg_value>", "</longcat_tool_call>", "<end_function_call>", "<|tool_call_end|>", "```", "</think>"),
    *(f"</\uff5cDSML\uff5c{name}>" for name in ("parameter", "invoke", "function_calls", "tool_calls")),
    *(f"</\uff5cDSML\uff5c {name}>" for name in ("parameter", "invoke", "calls")),
    *(f"<\uff5ctool▁{name}\uff5c>" for name in ("call▁end", "calls▁end")),
]
START_TAGS = [
    *("<tool_call>", "<function=write>", "<function=other>", "<parameter=count>", "<parameter=text>", "<parameter=x>"),
    *("<arg_key>count</arg_key><arg_value>", "<arg_key>x</arg_key>\n<arg_value>", '<invoke name="write">'),
    *('<parameter name="count">', '<|open|>argument key="count" type="number"<|sep|>', "call:write{"),
]
PIECES = [*END_TAGS, "\n", "  ", "\t", "null", "true", "12345678901234567890", '"', "'", "\\", "{", "}", "é", "<", ","]
CLOSED = re.compile(
    r"</parameter>\s*</(?:function|invoke)>|</(?:longcat_)?arg_value>\s*</(?:longcat_)?tool_call>|</param>\s*</function>"
    r"|</atem:parameter>\s*</atem:invoke>|</\uff5cDSML\uff5c ?parameter>\s*</\uff5cDSML\uff5c ?invoke>"
    r"|<\|close\|>argument<\|sep\|>\s*<\|close\|>call<\|sep\|>"
)
"""Texts that end a call. A value that contains one cannot be told from the end of its call."""
PARAMETERS = {
    **{"text": {"type": "string"}, "count": {"type": "integer"}, "flag": {"type": "boolean"}},
    **{"share": {"type": "number"}, "more": {"type": "array"}},
}
WRITE = {"type": "function", "function": {"name": "write", "parameters": {"properties": PARAMETERS}}}
strings = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
arguments = st.fixed_dictionaries(
    {"text": strings},
    optional={
        "count": st.integers(-(10**20), 10**20),
        "flag": st.booleans(),
        "share": st.sampled_from([0.5, -1.25, 1e300]),
        "more": st.lists(st.integers(0, 10**20), min_size=1, max_size=2),
    },
)


def calls_of(format: Any, parts: Sequence[str], tools: Any = (WRITE,)) -> list[tuple[str, dict[str, Any]]]:
    reader = AnswerParser(format, ToolOffer.of(tools))
    deltas = [*(delta for part in parts for delta in reader.push(part)), *reader.finish()]
    return [(d.tool_call.name, json.loads(d.tool_call.arguments)) for d in deltas if d.tool_call is not None]


def can_be_written(writer: Callable[[Calls], str], text: str) -> bool:
    """Return whether a notation has a way to write a text."""
    name = writer.__name__
    if name in ("minicpm5", "function_gemma"):  # neither has an escape for its own quotes
        return "]]>" not in text and "<escape>" not in text and (name == "function_gemma" or text == text.strip())
    return True


@pytest.mark.parametrize(("name", "writer"), CALLING)
def test_any_text_in_an_argument_comes_back_unchanged(name: str, writer: Callable[[Calls], str]) -> None:
    format = format_of(name)

    @settings(max_examples=some(100), deadline=None)
    @given(arguments, st.booleans())
    @example({"text": " are </parameter>, </tool_call> and </invoke> here.\n"}, True)
    @example({"text": "null", "count": 12345678901234567890}, False)
    @example({"text": "    return x\n"}, False)
    def check(values: dict[str, Any], last: bool) -> None:
        assume(can_be_written(writer, values["text"]) and not CLOSED.search(values["text"] + "\n"))
        written = {key: values[key] for key in sorted(values, reverse=last)}
        text = writer([("write", written)])
        assert calls_of(format, [text]) == [("write", values)]
        assert calls_of(format, list(text)) == [("write", values)]

    check()


@pytest.mark.parametrize(("name", "writer"), CALLING)
def test_a_text_with_tags_that_begin_parts_is_unchanged_or_no_call(name: str, writer: Callable[[Calls], str]) -> None:
    format = format_of(name)
    texts = st.lists(st.sampled_from([*START_TAGS, *PIECES]), max_size=8).map("".join)

    @settings(max_examples=some(60), deadline=None)
    @given(texts, texts)
    def check(text: str, second: str) -> None:
        assume(all(can_be_written(writer, value) and not CLOSED.search(value) for value in (text, second)))
        calls = [("write", {"text": text, "count": 1}), ("write", {"count": 2, "text": second})]
        answer = writer(calls)
        parsed = calls_of(format, [answer])
        assert all(call in calls for call in parsed)
        assert calls_of(format, list(answer)) == parsed

    check()
