"""Boundaries of chats: the prefixes that later chats share, for several templates."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from eagle_mlx.serve.chat import ChatFormat
from eagle_mlx.serve.chat.tools import AnswerStates
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
"""Reasoning stays until the next question, as in Qwen3's template."""


def format_with(template: str) -> ChatFormat:
    tokenizer = deepcopy(tokenizer_of("plain"))
    tokenizer.chat_template = template
    return ChatFormat(tokenizer, AnswerStates(), None)


def beginnings(format: ChatFormat, messages: list[dict[str, Any]]) -> list[str]:
    """Return the prefixes of the prompt that are expected to recur."""
    chat = format.chat(messages)
    prompt = chat.tokens()
    return [str(chat.tokenizer.decode(prompt[:end])) for end in chat.boundaries(prompt)]


def test_boundaries_follow_the_system_prompt_and_the_last_message() -> None:
    system = f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n<|im_start|>user\n"
    assert beginnings(format_of("plain"), [SYSTEM, *HELLO]) == [system, f"{system}hello<|im_end|>\n"]


@pytest.mark.parametrize("name", ["plain", "qwen", "thinking", "mistral"])
def test_later_prompts_begin_with_the_expected_prefixes(name: str) -> None:
    """In the prompts of another question and of the next turn. A prompt's end is always a boundary."""
    format = format_of(name)
    system, tools = [] if name == "mistral" else [SYSTEM], [] if name == "plain" else [WEATHER]
    chat = [*system, *HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "and now?"}]
    rendered = format.chat(chat, tools)
    prompt = rendered.tokens()
    ends = rendered.boundaries(prompt)
    other = format.chat([*system, {"role": "user", "content": "What else?"}], tools).tokens()
    following = format.chat([*chat, {"role": "assistant", "content": "then"}, BYE], tools).tokens()
    assert prompt[: ends[0]] == other[: ends[0]]
    assert prompt[ends[0]] != other[ends[0]]
    assert any(prompt[:end] == following[:end] and len(prompt) - end <= 8 for end in (*ends, len(prompt)))


def test_thoughts_that_the_next_turn_drops_come_after_a_boundary() -> None:
    called = {"id": "1", "function": {"name": "clock", "arguments": "{}"}}
    chat = [
        *HELLO,
        {"role": "assistant", "content": "I look.", "reasoning_content": "What is it?", "tool_calls": [called]},
        {"role": "tool", "content": "a clock", "tool_call_id": "1"},
    ]
    question = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    answered = f"{question}<think>What is it?</think>I look.clock<|im_end|>\n<|im_start|>tool\na clock<|im_end|>\n"
    assert beginnings(format_with(FORGETS), chat)[1:] == [question, answered]


def test_a_template_that_refuses_other_chats_has_fewer_boundaries() -> None:
    only = "{% if messages | length > 2 %}{{ raise_exception('no more') }}{% endif %}" + FORGETS
    assert len(beginnings(format_with(only), [SYSTEM, *HELLO])) == 2
    assert len(beginnings(format_with(FORGETS), [SYSTEM, *HELLO])) == 3


def test_only_the_shorter_side_of_a_boundary_is_encoded() -> None:
    encoded, tokenizer = list[str](), tokenizer_of("plain")

    def encode(text: str, special: bool) -> list[int]:
        encoded.append(text)
        return list(tokenizer.encode(text, add_special_tokens=special))

    chat = format_of("plain").chat([SYSTEM, {"role": "user", "content": "hello " * 100}])
    assert len(chat.boundaries(chat.tokens(), encode)) == 2
    assert sum(map(len, encoded)) < 0.5 * len(chat.text)
