"""Calls that a grammar enforces: their arguments are streamed as the model writes them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from eagle_mlx.serve.chat import AnswerParser, Delta, ToolOffer, whole_calls
from tests.full import in_full
from tests.serve.chat.formats import CLOCK, WEATHER, format_of

TOOLS = [WEATHER, CLOCK]
FORMATS = ["qwen", "thinking", "gpt-oss", "llama3", "gemma", "deepseek"]
HARD = r"""{"city": "a \"}\\\" 'b\\", "days":  [3, {"x": "</tool_call> {漢"}],
 "t": "</think>\u00e9```\n; {\"name\": \"clock\"", "n": 12345678901234567890}"""
Read = tuple[str, str, list[tuple[int, str, str]], bool]


def read(name: str, parts: Sequence[str], complete: bool = True, several: bool = True, enforced: bool = True) -> Read:
    """Return content, reasoning, calls, and whether the last call is open."""
    reader = AnswerParser(format_of(name), ToolOffer.of(TOOLS, parallel=several), enforced=enforced)
    deltas = [delta for part in parts for delta in reader.push(part)]
    deltas += reader.finish(complete)
    calls = whole_calls(delta.tool_call for delta in deltas)
    assert len({call.id for call in calls}) == len(calls)
    content, reasoning = ("".join(getattr(d, kind) for d in deltas) for kind in ("content", "reasoning"))
    return content, reasoning, [(call.index, call.name, call.arguments) for call in calls], reader.has_open_call


def answer(name: str, several: bool = True) -> tuple[str, list[tuple[int, str, str]]]:
    """Return the text of calls, as this format's grammar has them, and the calls."""
    tags = format_of(name).calls
    assert tags is not None
    assert tags.form is not None
    calls = [("get_weather", HARD), ("clock", "{ }")]
    calls = calls if several and (tags.form.inner is not None or tags.form.outer is not None) else calls[:1]
    return tags.form.write(calls), [(index, *call) for index, call in enumerate(calls)]


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_are_the_text_that_the_model_wrote_however_it_is_cut(name: str) -> None:
    text, calls = answer(name)
    expected = ("", "", calls, False)
    assert read(name, [text]) == read(name, list(text)) == expected
    for at in range(0, len(text), in_full(1, 3)):
        assert read(name, [text[:at], text[at:]]) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_was_cut_short_has_the_arguments_so_far_whole_and_streamed(name: str) -> None:
    text, calls = answer(name)
    counts = set[int]()
    for end in range(0, len(text), in_full(1, 3)):
        content, reasoning, partial, is_open = whole = read(name, [text[:end]], complete=False)
        assert whole == read(name, list(text[:end]), complete=False)
        assert content in text, "a fragment of an opening tag is text"
        assert reasoning == ""
        assert [call[:2] for call in partial] == [call[:2] for call in calls[: len(partial)]]
        assert all(full[2].startswith(part[2]) for part, full in zip(partial, calls, strict=False))
        assert is_open == any(part[2] != full[2] for part, full in zip(partial, calls, strict=False))
        counts.add(len(partial))
    assert counts >= {0, 1, len(calls)}


@pytest.mark.parametrize("name", FORMATS)
def test_a_long_argument_arrives_as_it_is_written(name: str) -> None:
    tags = format_of(name).calls
    assert tags is not None
    assert tags.form is not None
    arguments = f'{{"city": "{"many words, " * 99}"}}'
    start, end = tags.form.write([("get_weather", arguments)]).split(arguments)
    reader = AnswerParser(format_of(name), ToolOffer.of(TOOLS), enforced=True)
    assert [d for d in reader.push(start) if d.tool_call] == []
    pieces = [reader.push(arguments[at : at + 10]) for at in range(0, len(arguments), 10)]
    calls = [delta.tool_call for (delta,) in pieces]
    assert [call and call.arguments for call in calls] == [
        arguments[at : at + 10] for at in range(0, len(arguments), 10)
    ]
    assert [bool(call and call.id and call.name) for call in calls] == [True, *[False] * (len(calls) - 1)]
    assert reader.push(end) + reader.finish() == []


@pytest.mark.parametrize("name", FORMATS)
def test_if_only_one_call_is_allowed_the_answer_ends_with_its_arguments(name: str) -> None:
    text, calls = answer(name)
    reader = AnswerParser(format_of(name), ToolOffer.of(TOOLS, parallel=False), enforced=True)
    end = text.index(HARD) + len(HARD)
    assert reader.push(text[: end - 1])
    assert not reader.has_ended
    assert reader.push(text[end - 1 :])
    assert reader.has_ended
    assert read(name, [text], several=False) == read(name, list(text), several=False) == ("", "", calls[:1], False)


def test_text_around_enforced_calls_stays_text() -> None:
    text, calls = answer("qwen")
    around = f"Let me see.\n{text} Done."
    expected = ("Let me see. Done.", "", calls, False)
    assert read("qwen", [around]) == read("qwen", list(around)) == expected


def test_a_call_that_a_thought_may_only_mention_comes_in_one_piece() -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Rome"}}\n</tool_call>'
    mention = f"<think>\nI could write {call} but no.</think>Hi"
    for text in (mention, mention[:60]):
        expected = read("thinking", [text], enforced=False)
        assert read("thinking", [text]) == read("thinking", list(text)) == expected
        assert expected[2] == []
    text = f"<think>\nhm {call}"
    assert read("thinking", [text]) == read("thinking", list(text))
    assert read("thinking", [text])[2] == [(0, "get_weather", '{"city": "Rome"}')]


@pytest.mark.parametrize("name", FORMATS)
def test_without_a_grammar_a_call_comes_in_one_piece(name: str) -> None:
    text = answer(name)[0].replace(HARD, '{"city":"Rome"}')
    reader = AnswerParser(format_of(name), ToolOffer.of(TOOLS))
    deltas: list[Delta] = [delta for letter in text for delta in reader.push(letter)] + reader.finish()
    calls = [delta.tool_call for delta in deltas if delta.tool_call]
    assert calls[0].arguments == '{"city": "Rome"}'
    assert all(call.id for call in calls)
