"""Tool calls and reasoning reach the template, and are learned with their answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.data_pipelines import Conversation, DataConfig, prompt_tokens, read_conversations, render_all
from eagle_mlx.data_pipelines.jsonl import as_line
from eagle_mlx.data_pipelines.rendering import examine
from eagle_mlx.data_pipelines.sources.rows import parse_row
from eagle_mlx.errors import DataError
from tests.data_pipelines.templates import render
from tests.fakes import plain_tokenizer

TOOLED = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t['function']['name'] }};{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m.get('reasoning_content') and KEEP %}<think>{{ m['reasoning_content'] }}</think>{% endif %}"
    "{{ m['content'] }}"
    "{% for c in m.get('tool_calls') or [] %}<call>{{ c['function']['name'] }}"
    "{% for k, v in c['function']['arguments'].items() %} {{ k }}={{ v }}{% endfor %}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Like published templates: arguments are objects, and reasoning comes before the answer."""

ALL = TOOLED.replace("KEEP", "true")
LAST = TOOLED.replace("KEEP", "loop.last")
"""The reasoning of earlier turns is dropped."""
MOVED = ALL.replace("<|im_start|>{{ m['role'] }}\n", "<|im_start|>{{ m['role'] }} of {{ messages | length }}\n")
"""A truncated conversation is not a prefix of the whole, so answers are found by the text around them."""

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris", "days": 2}'}}
ROW: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Warm?"},
        {"role": "assistant", "content": None, "reasoning_content": "Look", "tool_calls": [CALL]},
        {"role": "tool", "content": "21"},
        {"role": "assistant", "content": "Yes", "reasoning_content": "Warm enough"},
    ],
    "tools": TOOLS,
}


def tokenizer(template: str) -> TokenizerWrapper:
    return TokenizerWrapper(plain_tokenizer(template))


def shown(template: str, row: dict[str, Any]) -> str:
    t = tokenizer(template)
    tokens, mask, *_ = render(t, parse_row(row, "x:1"))
    out, inside = "", 0
    for token, learned in zip([*tokens, None], [*mask, 0], strict=True):
        if learned != inside:
            out, inside = out + ("⟦" if learned else "⟧"), learned
        out += t.decode([token]) if token is not None else ""
    return out


def expected(first: str, of: str = "") -> str:
    return (
        "<|im_start|>system\nweather;<|im_end|>\n"
        f"<|im_start|>user{of}\nWarm?<|im_end|>\n<|im_start|>assistant{of}\n⟦{first}<|im_end|>⟧\n"
        f"<|im_start|>tool{of}\n21<|im_end|>\n"
        f"<|im_start|>assistant{of}\n⟦<think>Warm enough</think>Yes<|im_end|>⟧\n"
    )


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (ALL, expected("<think>Look</think><call>weather city=Paris days=2</call>")),
        (LAST, expected("<call>weather city=Paris days=2</call>")),
        (MOVED, expected("<think>Look</think><call>weather city=Paris days=2</call>", " of 4")),
    ],
    ids=["all thoughts", "the last thoughts", "no prefixes"],
)
def test_calls_and_thoughts_are_rendered_and_learned(template: str, text: str) -> None:
    assert shown(template, ROW) == text


def test_they_come_back_from_a_file_as_they_were(tmp_path: Path) -> None:
    conversation = parse_row(ROW, "x:1")
    arguments = conversation.messages[1].extra["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"city": "Paris", "days": 2}
    path = tmp_path / "x.jsonl"
    other = parse_row({**ROW, "messages": ROW["messages"][:1], "tools": json.dumps(TOOLS)}, "x:2")
    path.write_bytes(as_line(conversation) + as_line(other))
    assert list(read_conversations(DataConfig((str(path),), seed=None), "all")) == [conversation, other]
    assert other.tools == conversation.tools


def test_a_prompt_ends_where_the_assistant_is_to_answer() -> None:
    t = tokenizer(ALL)
    text = t.decode(prompt_tokens(t, parse_row(ROW, "x:1")))
    assert text.endswith("<|im_start|>tool\n21<|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system\nweather;")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": "f()"}]},
            "message 1: `tool_calls` must be a l",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": ["f"]}]},
            "`tool_calls` must be a list of obj",
        ),
        ({"prompt": "a", "tools": "none"}, "x:1: `tools` must be a list of objects, or a JSON string of one"),
    ],
)
def test_calls_and_tools_that_cannot_be_are_refused(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        parse_row(row, "x:1")


def test_conversations_that_a_template_refuses_may_be_left_out() -> None:
    t = tokenizer("{% if messages[0]['role'] != 'user' %}{{ raise_exception('who asks?') }}{% endif %}" + ALL)
    good = parse_row({"prompt": "a", "completion": "b"}, "x:1")
    greeting = parse_row({"messages": [{"role": "assistant", "content": "Hello"}]}, "x:2")
    with pytest.raises(DataError, match=r"x:2: the chat template refuses this conversation: who asks\?"):
        render_all(t, [good, greeting], 100)
    kept, report = render_all(t, [good, greeting, Conversation(good.messages[:1])], 100, skip_bad=True)
    assert (len(kept), report.conversations, report.unusable) == (1, 1, 2)


IGNORING = (
    "{% for m in messages if m['role'] != 'tool' %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Ignores tools, calls, tool results and reasoning, as many small models' templates do."""
TAGGED = IGNORING.replace(
    "{{ m['content'] }}<|im_end|>",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}",
)
CALLS_ONLY: dict[str, Any] = {"messages": ROW["messages"][:2], "tools": TOOLS}
THOUGHTS_ONLY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "reasoning": "b"}]
}
PLAIN: dict[str, Any] = {"prompt": "a", "completion": "b"}


def test_what_a_template_renders_is_not_missed() -> None:
    for template in (ALL, MOVED):
        _, lost = examine(tokenizer(template), parse_row(ROW, "x:1"))
        assert lost == ((), frozenset(), 2)
    assert examine(tokenizer(LAST), parse_row(ROW, "x:1"))[1].parts == ()
    rows = [parse_row(row, "x:1") for row in (ROW, CALLS_ONLY, PLAIN)]
    kept, report = render_all(tokenizer(ALL), rows, 100)
    assert len(kept) == 3
    assert report.notes("tiny") == []


@pytest.mark.parametrize("template", [IGNORING, TAGGED])
def test_what_a_template_ignores_is_counted_and_empty_answers_are_not_learned(template: str) -> None:
    t = tokenizer(template)
    rows = [parse_row(row, f"x:{at}") for at, row in enumerate((ROW, CALLS_ONLY, THOUGHTS_ONLY, PLAIN))]
    kept, report = render_all(t, rows, 100)
    learned = [t.decode([a for a, b in zip(*sample[:2], strict=True) if b]) for sample in kept]
    assert learned == ["Yes<|im_end|>", "b<|im_end|>"]
    assert (report.conversations, report.dropped, report.unusable) == (2, 0, 0)
    assert report.notes("tiny") == [
        "the chat template of tiny does not render reasoning: 3 conversations affected",
        "the chat template of tiny does not render tool calls: 2 conversations affected",
        "the chat template of tiny does not render tool results: 1 conversation affected",
        "the chat template of tiny does not render tools: 2 conversations affected",
        "answers that render as nothing: 2 conversations skipped, 1 turn of other conversations not learned",
    ]


def test_an_answer_that_was_empty_from_the_start_is_not_learned() -> None:
    empty = parse_row({"prompt": "a", "completion": ""}, "x:1")
    kept, report = render_all(tokenizer(ALL), [empty, parse_row(PLAIN, "x:2")], 100)
    assert (len(kept), report.empty) == (1, 1)
