"""Messages of every role reach the template in a form that it takes, or are named as lost."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_mlx.data_pipelines import prompt_tokens, render_all
from eagle_mlx.data_pipelines.sources.rows import parse_row
from eagle_mlx.data_pipelines.template import answer_message
from eagle_mlx.errors import DataError
from tests.data_pipelines.templates import shown, template_tokenizer

END = ["<|end|>"]
KNOWN = (
    "{% for m in messages %}"
    "{% if (m['role'] == 'system' and loop.first) or m['role'] in ['user', 'assistant', 'tool'] %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}{% for c in m.get('tool_calls') or [] %}<call>{{ c['function']['name'] }}"
    "{{ c['function']['arguments'] | tojson }}</call>{% endfor %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As Qwen3: other roles and late system messages vanish without an error."""
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As Gemma 2: no system role, and users and assistants take turns."""
TYPED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] }}{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Reads contents that are lists of parts, and no others."""
TEXTS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% for c in m.get('tool_calls') or [] %}"
    "{{ '<call>' + c['function']['name'] + c['function']['arguments'] + '</call>' }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As DeepSeek-R1: arguments are concatenated, so they must be text."""


def talk(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": f"{role}{at}"} for at, role in enumerate(roles)]}


@pytest.mark.parametrize(
    ("template", "roles", "expected"),
    [
        (
            KNOWN,
            "developer user assistant",
            "<|system|>developer0<|end|><|user|>user1<|end|><|assistant|>⟦assistant2<|end|>⟧",
        ),
        (
            KNOWN,
            "system user assistant system user assistant",
            "<|system|>system0<|end|><|user|>user1<|end|><|assistant|>⟦assistant2<|end|>⟧"
            "<|user|>system3<|end|><|user|>user4<|end|><|assistant|>⟦assistant5<|end|>⟧",
        ),
        (
            STRICT,
            "system user assistant developer user assistant",
            "<|user|>system0\n\nuser1<|end|><|assistant|>⟦assistant2<|end|>⟧"
            "<|user|>developer3\n\nuser4<|end|><|assistant|>⟦assistant5<|end|>⟧",
        ),
        (STRICT, "user user assistant", "<|user|>user0\n\nuser1<|end|><|assistant|>⟦assistant2<|end|>⟧"),
        (
            TYPED,
            "system user assistant",
            "<|system|>system0<|end|><|user|>user1<|end|><|assistant|>⟦assistant2<|end|>⟧",
        ),
    ],
    ids=["developer", "late system", "no system role", "users in a row", "typed contents"],
)
def test_each_role_reaches_the_template_in_a_form_that_it_takes(template: str, roles: str, expected: str) -> None:
    assert shown(template_tokenizer(template, END), talk(*roles.split())) == expected


def test_roles_that_a_template_knows_stay_as_they_are() -> None:
    every = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    text = shown(template_tokenizer(every, END), talk("developer", "user", "system", "user", "assistant"))
    assert text.startswith("<|developer|>developer0<|end|><|user|>user1<|end|><|system|>system2<|end|><|user|>user3")


def test_a_prompt_has_the_form_of_the_whole_conversation() -> None:
    for template in (KNOWN, STRICT, TYPED):
        tokenizer = template_tokenizer(template, END)
        row = talk("developer", "user", "assistant", "user", "assistant")
        whole, prompt = shown(tokenizer, row), tokenizer.decode(prompt_tokens(tokenizer, parse_row(row, "x:1")))
        assert whole.replace("⟦", "").replace("⟧", "").startswith(prompt)
        assert prompt.endswith("user3<|end|><|assistant|>")


def test_messages_that_a_template_drops_are_named_and_counted() -> None:
    tokenizer = template_tokenizer(KNOWN, END)
    rows = [parse_row(talk(*roles.split()), "x:1") for roles in ("critic user assistant", "user assistant")]
    _, report = render_all(tokenizer, rows, 100)
    assert report.conversations == 2
    assert report.notes("tiny") == [
        "the chat template of tiny does not render messages of role critic: 1 conversation affected"
    ]


def test_text_next_to_calls_that_a_template_drops_is_named() -> None:
    either = KNOWN.replace("{{ m['content'] }}", "{{ m['content'] if not m.get('tool_calls') }}")
    call = {"function": {"name": "f", "arguments": {"a": "b"}}}
    messages = [
        *talk("user", "assistant")["messages"],
        {"role": "assistant", "content": "I call.", "tool_calls": [call]},
    ]
    _, report = render_all(template_tokenizer(either, END), [parse_row({"messages": messages}, "x:1")], 100)
    assert report.notes("tiny") == [
        "the chat template of tiny does not render text of answers with tool calls: 1 conversation affected"
    ]


CALLS: dict[str, Any] = {
    "conversations": [
        {"from": "human", "value": "Warm?"},
        {"from": "function_call", "value": '<think>Look</think>[{"name": "weather", "arguments": {"city": "Paris"}}]'},
        {"from": "observation", "value": "21"},
        {"from": "gpt", "value": "Yes"},
    ]
}
"""As in LLaMA-Factory."""


def test_function_call_and_observation_are_calls_and_results() -> None:
    text = '<call>weather{"city": "Paris"}</call>'
    assert shown(template_tokenizer(KNOWN, END), CALLS) == (
        f"<|user|>Warm?<|end|><|assistant|>⟦<think>Look</think>{text}<|end|>⟧<|tool|>21<|end|><|assistant|>⟦Yes<|end|>⟧"
    )
    messages = parse_row(CALLS, "x:1").messages
    assert messages[2].extra == {"tool_call_id": messages[1].extra["tool_calls"][0]["id"], "name": "weather"}
    assert parse_row(parse_row(CALLS, "x:1").as_row(), "x:1") == parse_row(CALLS, "x:1")


def test_a_call_in_the_older_key_of_openai_is_a_tool_call() -> None:
    call = {"name": "f", "arguments": '{"a": 1}'}
    message = parse_row({"messages": [{"role": "assistant", "content": None, "function_call": call}]}, "x:1").messages[
        0
    ]
    assert message.extra == {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}


def test_a_function_call_that_is_no_json_is_refused() -> None:
    with pytest.raises(DataError, match=r"x:1: `conversations`, message 1: the calls must be JSON, .* not \"f\(\)\""):
        parse_row({"conversations": [{"from": "function_call", "value": "f()"}]}, "x:1")


def test_arguments_are_text_for_templates_that_take_no_objects() -> None:
    assert '⟦<think>Look</think><call>weather{"city": "Paris"}</call><|end|>⟧' in shown(
        template_tokenizer(TEXTS, END), CALLS
    )


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_reaches_the_template_under_any_name(key: str, read: str) -> None:
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m."
        + read
        + " }}{{ m['content'] }}<|end|>{% endfor %}"
        + ("{% if add_generation_prompt %}<|assistant|>{% endif %}")
    )
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", key: "c"}]}
    tokenizer = template_tokenizer(template, END)
    assert shown(tokenizer, row) == "<|user|>a<|end|><|assistant|>⟦cb<|end|>⟧"
    assert render_all(tokenizer, [parse_row(row, "x:1")], 100)[1].notes("tiny") == []


THOUGHTS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}"
    "{% set parts = ((m.get('reasoning_content') or '') ~ '</think>' ~ m['content']) if '</think>' not in m['content']"
    " else m['content'] %}<think>\n{{ parts.split('</think>')[0].split('<think>')[-1].strip() }}\n</think>\n\n"
    "{{ parts.split('</think>')[-1].strip() }}{% else %}{{ m['content'] }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As Qwen3: splits thoughts off the content, and writes empty ones too."""
BEGUN = THOUGHTS.replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}")
"""As Qwen3-Thinking: the prompt begins the thoughts."""
FORGOTTEN = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'].split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
"""As R1's distilled models: the history has no thoughts."""
CHANNELS = (
    "{% for m in messages %}{% if '<|channel|>' in m['content'] %}{{ raise_exception('channels in a content') }}"
    "{% endif %}<|start|>{{ m['role'] }}{% if m['role'] == 'assistant' %}{% if m.get('thinking') and loop.last %}"
    "<|channel|>analysis<|message|>{{ m['thinking'] }}<|end|><|start|>assistant{% endif %}<|channel|>final{% endif %}"
    "<|message|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""As gpt-oss: refuses its own tags in a content."""
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("template", "written", "content", "extra"),
    [
        (THOUGHTS, "<think>\nSo\n</think>\n\nYes", "<think>\nSo\n</think>\n\nYes", {}),
        (THOUGHTS, "<think>\nSo far", "", {"reasoning_content": "So far"}),
        (THOUGHTS, "Yes", "Yes", {}),
        (BEGUN, "So\n</think>\n\nYes", "So\n</think>\n\nYes", {}),
        (BEGUN, "So far", "", {"reasoning_content": "So far"}),
        (FORGOTTEN, "So far", "So far", {}),
        (CHANNELS, f"{ANALYSIS}So<|end|><|start|>assistant{FINAL}Yes", "Yes", {"thinking": "So"}),
        (CHANNELS, f"{ANALYSIS}So far", "", {"thinking": "So far"}),
        (CHANNELS, f"{FINAL}Yes", "Yes", {}),
        (KNOWN, f"{FINAL}Yes", f"{FINAL}Yes", {}),
    ],
)
def test_an_answer_is_the_message_that_the_template_writes_like_it(
    template: str, written: str, content: str, extra: dict[str, str]
) -> None:
    tokenizer = template_tokenizer(template, END)
    question = {"role": "user", "content": "Warm?"}
    message = answer_message(tokenizer, parse_row({"messages": [question]}, "x:1"), written)
    assert (message.content, dict(message.extra)) == (content, extra)
    learned = shown(tokenizer, {"messages": [question, message.as_dict()]}).replace("⟦", "")
    if template is not FORGOTTEN and written != "Yes":
        assert written in learned
