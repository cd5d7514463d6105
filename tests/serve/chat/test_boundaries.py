"""Where chats part from those that come later, by what templates write of them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from eagle_mlx.serve.chat import ChatFormat
from eagle_mlx.serve.chat.parser import ReasoningTags
from eagle_mlx.serve.chat.template import Boundaries
from tests.serve.chat.formats import HELLO, WEATHER, format_of, tokenizer_of

SYSTEM = {"role": "system", "content": "You are of few words. " * 5}
BYE = {"role": "user", "content": "bye"}
FORGETS = """
{%- set asked = namespace(at=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set asked.at = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
  {{- '<|im_start|>' + m.role + '\\n' }}
  {%- if m.reasoning_content and loop.index0 > asked.at %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
  {{- m.content }}
  {%- for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}
  {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>' }}{% endif %}"""
"""Thoughts stay until the next question, as in Qwen3's template."""


def format_with(template: str) -> ChatFormat:
    tokenizer = deepcopy(tokenizer_of("plain"))
    tokenizer._tokenizer.chat_template = template
    return ChatFormat(tokenizer, ReasoningTags(), None)


def beginnings(format: ChatFormat, messages: list[dict[str, Any]]) -> list[str]:
    """What of the prompt is expected again."""
    assert format.tokenizer is not None
    prompt = format.prompt(messages)
    return [str(format.tokenizer.decode(prompt[:end])) for end in format.boundaries(prompt, messages)]


def test_behind_the_system_prompt_and_behind_the_last_message() -> None:
    system = f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n<|im_start|>user\n"
    assert beginnings(format_of("plain"), [SYSTEM, *HELLO]) == [system, f"{system}hello<|im_end|>\n"]


@pytest.mark.parametrize("name", ["plain", "qwen", "thinking", "mistral"])
def test_what_is_expected_again_comes_again(name: str) -> None:
    """The prompt of another question, and that of the next turn; a prompt's end is a boundary in any case."""
    format = format_of(name)
    system, tools = [] if name == "mistral" else [SYSTEM], None if name == "plain" else [WEATHER]
    chat = [*system, *HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "and now?"}]
    prompt = format.prompt(chat, tools)
    ends = format.boundaries(prompt, chat, tools)
    other = format.prompt([*system, {"role": "user", "content": "What else?"}], tools)
    following = format.prompt([*chat, {"role": "assistant", "content": "then"}, BYE], tools)
    assert prompt[: ends[0]] == other[: ends[0]]
    assert prompt[ends[0]] != other[ends[0]]
    assert any(prompt[:end] == following[:end] and len(prompt) - end <= 8 for end in (*ends, len(prompt)))


def test_thoughts_that_the_next_turn_leaves_out_are_behind_a_boundary() -> None:
    called = {"id": "1", "function": {"name": "clock", "arguments": "{}"}}
    chat = [
        *HELLO,
        {"role": "assistant", "content": "I look.", "reasoning_content": "What is it?", "tool_calls": [called]},
        {"role": "tool", "content": "a clock", "tool_call_id": "1"},
    ]
    asked = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    answered = f"{asked}<think>What is it?</think>I look.clock<|im_end|>\n<|im_start|>tool\na clock<|im_end|>\n"
    assert beginnings(format_with(FORGETS), chat)[1:] == [asked, answered]


def test_a_template_that_refuses_other_chats_has_fewer_boundaries() -> None:
    only = "{% if messages | length > 2 %}{{ raise_exception('no more') }}{% endif %}" + FORGETS
    assert len(beginnings(format_with(only), [SYSTEM, *HELLO])) == 2
    assert len(beginnings(format_with(FORGETS), [SYSTEM, *HELLO])) == 3


def test_no_system_prompt_is_encoded_twice() -> None:
    encoded, tokenizer = list[str](), tokenizer_of("plain")
    finder, format = Boundaries(), format_of("plain")

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return list(tokenizer.encode(text, add_special_tokens=False))

    for question in ("hello " * 100, "bye " * 100):
        chat = [SYSTEM, {"role": "user", "content": question}]
        finder.find(format._render, chat, {"add_generation_prompt": True}, format.prompt(chat), encode)
    assert sum(SYSTEM["content"] in text for text in encoded) == 1
    assert max(len(text) for text in encoded if SYSTEM["content"] not in text) < 40
