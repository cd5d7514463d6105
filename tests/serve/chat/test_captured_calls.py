"""Real answers of gpt-oss, Llama, Gemma and DeepSeek, from public issues and guides, in any division into pieces."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx.serve.chat import AnswerParser, Delta, ToolOffer
from tests.full import in_turn, some
from tests.serve.chat.formats import format_of


@dataclass(frozen=True)
class Capture:
    source: str
    format: str
    """Its name in `formats.py`."""
    text: str
    """As in the source, but with `|` for the wide bars in DeepSeek's tags."""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    content: str = ""
    reasoning: str = ""


HARMONY = "github.com/openai/openai-cookbook/blob/main/articles/openai-harmony.md"
GEMMA = "ai.google.dev/gemma/docs/capabilities/function-calling"
LLAMA_4 = "github.com/vllm-project/vllm/issues/46863 and the tests of its fix"
TWO_FIELDS = '{"type": "function", "function": {"name": "get_current_traffic", "parameters": {"location": "Sydney"}}'
CAPTURES = (
    Capture(
        "github.com/kekzl/imp/pull/1719",
        "gpt-oss",
        '<|channel|>analysis<|message|>We need to use the get_weather function. Provide city "Berlin".<|end|>\n'
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city":"Berlin"}',
        (("get_weather", {"city": "Berlin"}),),
        reasoning='We need to use the get_weather function. Provide city "Berlin".',
    ),
    Capture(
        "github.com/waybarrios/vllm-mlx/pull/562",
        "gpt-oss",
        "<|channel|>analysis<|message|>We need to run ffgrep. Let us search.\n<|end|><|start|>assistant"
        "<|channel|>analysis to=functions.ffgrep code<|message|>\n"
        '{"path":"","pattern":"TextualDisplayView"}<|call|>',
        (("ffgrep", {"path": "", "pattern": "TextualDisplayView"}),),
        reasoning="We need to run ffgrep. Let us search.",
    ),
    Capture(
        "github.com/waybarrios/vllm-mlx/pull/50",
        "gpt-oss",
        '<|channel|>commentary to=functions.get_weather\n<|constrain|>json\n<|message|>{"location": "San Francisco", '
        '"unit": "celsius"}\n<|call|>',
        (("get_weather", {"location": "San Francisco", "unit": "celsius"}),),
    ),
    Capture(
        HARMONY,
        "gpt-oss",
        "<|channel|>analysis<|message|>{long chain of thought}<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "**Action plan**:\n1. Generate an HTML file\n---\nWill start executing the plan step by step<|end|><|start|>"
        "assistant<|channel|>commentary to=functions.generate_file<|constrain|>json<|message|>"
        '{"template": "basic_html", "path": "index.html"}<|call|>',
        (("generate_file", {"template": "basic_html", "path": "index.html"}),),
        "**Action plan**:\n1. Generate an HTML file\n---\nWill start executing the plan step by step",
        "{long chain of thought}",
    ),
    Capture(
        HARMONY,
        "gpt-oss",
        '<|channel|>analysis<|message|>User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.<|end|>\n'
        "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
        content="2 + 2 = 4.",
        reasoning='User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.',
    ),
    Capture(
        LLAMA_4,
        "llama3",
        "<|python_start|>[get_weather(city='LA', metric='C')]<|python_end|>",
        (("get_weather", {"city": "LA", "metric": "C"}),),
    ),
    Capture(
        LLAMA_4,
        "llama3",
        '{"type": "function", "name": "Bash", "parameters": {"command": "echo hello", "timeout": 120000, '
        '"run_in_background": false}}',
        (("Bash", {"command": "echo hello", "timeout": 120000, "run_in_background": False}),),
    ),
    Capture(
        LLAMA_4,
        "llama3",
        r"[get_weather(city='Martha\'s Vineyard', metric='\"cool units\"'), register_user(name='Doe', "
        "address={'city': 'LA'}, role=None, passed_test=True, aliases=['John', 'Johnny'])]",
        (
            ("get_weather", {"city": "Martha's Vineyard", "metric": '"cool units"'}),
            (
                "register_user",
                {
                    "name": "Doe",
                    "address": {"city": "LA"},
                    "role": None,
                    "passed_test": True,
                    "aliases": ["John", "Johnny"],
                },
            ),
        ),
    ),
    Capture(
        "github.com/vllm-project/vllm/issues/16214",
        "llama3",
        '<|python_start|>{"name": "brave_web_search", "parameters": {"query": "latest news"}}<|python_end|>',
        (("brave_web_search", {"query": "latest news"}),),
    ),
    Capture(
        "github.com/ollama/ollama/issues/13519",
        "llama3",
        '```json\n{"name": "query_web_search", "parameters": {"query": "install ollama models"}}\n```',
        (("query_web_search", {"query": "install ollama models"}),),
    ),
    Capture(
        "github.com/vllm-project/vllm/issues/11786", "llama3", TWO_FIELDS, content=TWO_FIELDS
    ),  # a brace is missing
    Capture(
        "github.com/vllm-project/vllm/issues/11786 (with the missing brace)",
        "llama3",
        TWO_FIELDS + "}",
        (("get_current_traffic", {"location": "Sydney"}),),
    ),
    Capture(
        "github.com/sgl-project/sglang/blob/main/test/srt/test_function_call_parser.py",
        "llama3",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}};'
        '{"name": "get_tourist_attractions", "parameters": {"city": "Paris"}}',
        (("get_weather", {"city": "Paris"}), ("get_tourist_attractions", {"city": "Paris"})),
    ),
    Capture(
        GEMMA,
        "gemma",
        '[get_product_name_by_PID(PID="807ZPKBL9V")]',
        (("get_product_name_by_PID", {"PID": "807ZPKBL9V"}),),
    ),
    Capture(
        GEMMA,
        "gemma",
        '{"name": "get_product_name_by_PID", "parameters": {"PID": "807ZPKBL9V"}}',
        (("get_product_name_by_PID", {"PID": "807ZPKBL9V"}),),
    ),
    Capture(
        "philschmid.de/gemma-function-calling",
        "gemma",
        '```tool_code\nconvert(amount=200000, currency="USD", new_currency="EUR")\n```',
        (("convert", {"amount": 200000, "currency": "USD", "new_currency": "EUR"}),),
    ),
    Capture(
        "github.com/google/adk-python/pull/5654",
        "deepseek",
        "<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>analysis_input\n```json\n"
        '{"work_dir_name":"..."}\n```<|tool▁call▁end|><|tool▁calls▁end|>',
        (("analysis_input", {"work_dir_name": "..."}),),
    ),
    Capture(
        "github.com/sgl-project/sglang/issues/4379 (shortened there)",
        "deepseek",
        "<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>get_current_weather\n```json\n"
        '{"location": "Tokyo"}\n```<|tool▁call▁end|>\n<|tool▁call▁begin|>function<|tool▁sep|>get_current_weather\n'
        '```json\n{"location": "Paris"}\n```<|tool▁call▁end|><|tool▁calls▁end|>',
        (("get_current_weather", {"location": "Tokyo"}), ("get_current_weather", {"location": "Paris"})),
    ),
    Capture(
        "github.com/vllm-project/vllm/pull/23454 (its description of V3.1)",
        "deepseek",
        '<|tool▁calls▁begin|><|tool▁call▁begin|>get_current_temperature<|tool▁sep|>{"location": "Tokyo"}'
        "<|tool▁call▁end|><|tool▁calls▁end|>",
        (("get_current_temperature", {"location": "Tokyo"}),),
    ),
)


def read(format: str, parts: list[str], names: set[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    tools = [{"type": "function", "function": {"name": name}} for name in sorted(names)]
    reader = AnswerParser(format_of(format), ToolOffer.of(tools))
    deltas: list[Delta] = [delta for part in parts for delta in reader.push(part)] + reader.finish()
    calls = [(delta.tool_call.name, json.loads(delta.tool_call.arguments)) for delta in deltas if delta.tool_call]
    return "".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas), calls


def divided(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def said(capture: Capture) -> str:
    """Return the text as the model writes it; DeepSeek's tags have wide bars."""
    return capture.text.replace("|", "\uff5c") if capture.format == "deepseek" else capture.text


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda capture: f"{capture.format}-{capture.source}")
def test_a_captured_answer_is_parsed_in_any_division(capture: Capture) -> None:
    names = {name for name, _ in capture.calls} | {"get_current_traffic", "clock"}
    expected = (capture.content, capture.reasoning, list(capture.calls))
    assert read(capture.format, [said(capture)], names) == expected
    assert read(capture.format, list(said(capture)), names) == expected
    for cut in in_turn(range(len(said(capture))), of=3):
        assert read(capture.format, divided(said(capture), [cut]), names) == expected


@pytest.mark.parametrize(
    "capture", [capture for capture in CAPTURES if capture.calls], ids=lambda capture: capture.source
)
def test_a_call_of_an_unknown_function_needs_tags(capture: Capture) -> None:
    """Without tags, it is JSON or Python as any text may hold it."""
    read_whole = read(capture.format, [said(capture)], {"clock"})
    if capture.format in ("gpt-oss", "deepseek"):
        assert read_whole == (capture.content, capture.reasoning, list(capture.calls))
    else:
        assert read_whole == (said(capture), "", [])


PIECES = {
    "gpt-oss": ["<|start|>assistant", "<|channel|>", "analysis", "commentary", "final", "<|message|>", "<|end|>",
                " to=functions.clock", "{}", "<|call|>", " <|constrain|>json", "a", "\n", " "],
    "llama3": ['{"name": "clock", "parameters": {}}', '{"name": "clock"', "[clock()]", "[clock(", "clock()", "; ", "\n",
               "```json\n", "```", "<|python_tag|>", "<|python_start|>", "<|python_end|>", *'{[}]"\\a'],
    "deepseek": [*(f"<\uff5ctool▁{n}\uff5c>" for n in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")),
                 "function", "clock", "\n```json\n", "{}", "\n```", "</think>", "a", "\n"],
}  # fmt: skip


@pytest.mark.parametrize("format", PIECES)
def test_any_text_is_parsed_the_same_in_any_division(format: str) -> None:
    @settings(max_examples=some(150), deadline=None)
    @given(st.lists(st.sampled_from(PIECES[format]), max_size=14), st.lists(st.integers(0, 150), max_size=8))
    def check(pieces: list[str], cuts: list[int]) -> None:
        text = "".join(pieces)
        whole = read(format, [text], {"clock"})
        assert read(format, divided(text, cuts), {"clock"}) == whole
        assert read(format, list(text), {"clock"}) == whole
        if format == "llama3" and not whole[2]:
            assert whole[0] == text

    check()
