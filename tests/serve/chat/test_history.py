"""Conversations for templates: every text reaches the prompt, and what templates refuse takes another form."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from eagle_mlx.errors import PromptError
from eagle_mlx.serve.chat import AnswerParser, ToolOffer
from eagle_mlx.serve.chat.history import joined, lost_message
from tests.serve.chat.formats import HELLO, WEATHER, format_of, format_with_template

TYPED = """
{%- for m in messages %}{{- '<' + m.role + '>' }}
  {%- for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}
{%- endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""
ONLY_KNOWN_ROLES = """
{%- for m in messages %}
  {%- if m.role in ('user', 'assistant') or (m.role == 'system' and loop.first) %}
    {{- '<' + m.role + '>' + (m.content.split('</think>') | last | trim) }}
  {%- endif %}
{%- endfor %}"""
ALTERNATING = """
{%- for m in messages %}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
  {{- '<' + m.role + '>' + m.content }}
{%- endfor %}"""
ALTERNATING_BUT_CALLS = """
{%- set ns = namespace(turns=0) %}
{%- for m in messages %}
  {%- if m.role != 'tool' and not m.tool_calls %}
    {%- if (m.role == 'user') != (ns.turns % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- if not m.content %}{{ raise_exception('content must not be empty') }}{% endif %}
    {%- set ns.turns = ns.turns + 1 %}
  {%- endif %}
  {{- '<' + m.role + '>' ~ m.content }}
  {%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{%- endfor %}"""
"""As in Mistral's templates."""
JSON_RESULTS = """
{%- for m in messages %}
  {{- m.role + ':' + (m.content | tojson if m.role == 'tool' else m.content | replace('/think', '') | trim) }}
  {%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{%- endfor %}"""
SYSTEM = {"role": "system", "content": "Be brief."}


def prompt(template: str, *messages: dict[str, Any]) -> str:
    return format_with_template(template).chat(list(messages)).text


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(id: str, arguments: Any = '{"city": "Oslo"}') -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": id, "type": "function", "function": function}]}


def test_a_template_that_reads_only_typed_parts_gets_them() -> None:
    long = "word " * 600
    chat = format_with_template(TYPED).chat([SYSTEM, said("user", long), said("assistant", "hi"), *HELLO])
    assert chat.text == f"<system>Be brief.<user>{long}<assistant>hi<user>hello<assistant>"
    tokens = chat.tokens()
    assert len(tokens) > 600
    assert chat.boundaries(tokens)[-1] < len(tokens)


def test_a_message_that_the_template_leaves_out_goes_in_as_a_user_message() -> None:
    late = [said("user", "one"), said("assistant", "two"), said("system", "three"), said("user", "four")]
    assert prompt(ONLY_KNOWN_ROLES, SYSTEM, *late) == ("<system>Be brief.<user>one<assistant>two<user>three<user>four")


def test_a_message_that_cannot_reach_the_prompt_is_refused_by_its_name() -> None:
    result = said("tool", "It rains in Oslo.", tool_call_id="1")
    with pytest.raises(PromptError, match=r"^messages\[2\]\.content: .*leaves out the tool message.*'It rains"):
        prompt(ONLY_KNOWN_ROLES + "{{ messages[1].tool_calls | tojson }}", *HELLO, call("1"), result)
    with pytest.raises(PromptError, match=r"^messages\[0\]\.content: .*leaves out the user message"):
        prompt("fixed", *HELLO)


def test_templates_may_trim_escape_and_drop_reasoning() -> None:
    thought = said("assistant", "<think>\nlong and secret\n</think>\n\n  The answer.  ")
    assert prompt(ONLY_KNOWN_ROLES, said("user", "\n  hello \n"), thought, *HELLO).endswith("The answer.<user>hello")
    assert prompt(ONLY_KNOWN_ROLES, *HELLO, said("assistant", "<think>all</think>"), *HELLO)
    result = said("tool", "", tool_call_id="1")
    flags = said("system", "Be brief. /think")
    for result["content"] in ('a "quoted"\n\\text <b>', "\x1b[32mPASS\x1b[0m", "100%\b\b\b\b\x00"):
        assert json.dumps(result["content"]) in prompt(JSON_RESULTS, flags, *HELLO, call("1"), result)
    for content in ("", " ", '"', "?", "漢字", "/think"):
        prompt(JSON_RESULTS, said("user", content))


def test_the_check_for_lost_messages_takes_one_pass() -> None:
    class Counted(str):
        searched = 0

        def find(self, text: str, start: int = 0) -> int:  # type: ignore[override]
            at = super().find(text, start)
            Counted.searched += (len(self) if at < 0 else at) - start
            return at

    messages = [said(("user", "assistant")[index % 2], f'number {index} "x"') for index in range(2000)]
    text = Counted("".join(f"<{message['role']}>{message['content']}" for message in messages))
    assert lost_message(messages, text, "</think>") is None
    assert Counted.searched <= 2 * len(text)
    text = Counted(text.replace("number 1998", ""))
    assert lost_message(messages, text, "</think>") == messages[1998]
    assert Counted.searched <= 5 * len(text)
    altered = [said("user", f"alone{index}") for index in range(2000)]
    lost_message(
        [said("tool", f"{message['content']}") for message in altered[::-1]],
        Counted("".join(message["content"] for message in altered)),
        "",
    )
    assert Counted.searched <= 80 * len(text)


@pytest.mark.parametrize("tools", [[], [WEATHER]])
@pytest.mark.parametrize("template", ["gemma", "mistral"])
def test_instructions_are_the_users_if_the_template_has_no_system_role(template: str, tools: Any) -> None:
    text = format_of(template).chat([SYSTEM, *HELLO], tools).text
    assert text.index("Be brief.") < text.index("hello")
    assert "system" not in text


@pytest.mark.parametrize("tools", [[], [WEATHER]])
def test_messages_of_a_role_are_joined_if_roles_must_alternate(tools: Any) -> None:
    answers = [said("assistant", "one"), said("assistant", "two")]
    text = format_of("gemma").chat([SYSTEM, *HELLO, *HELLO, *answers, *HELLO], tools).text
    assert "hello\n\nhello<end_of_turn>" in text
    assert "one\n\ntwo<end_of_turn>" in text
    assert prompt(ALTERNATING, *HELLO, *HELLO) == "<user>hello\n\nhello"
    assert prompt(ALTERNATING, answers[0], *HELLO) == "<user><assistant>one<user>hello"


def test_a_user_may_speak_after_a_result_or_an_unanswered_call_if_roles_must_alternate() -> None:
    result, late = said("tool", "rain", tool_call_id="1"), said("system", "Hurry.")
    text = prompt(ALTERNATING_BUT_CALLS, *HELLO, call("1"), result, *HELLO, said("assistant", "hm"), *HELLO)
    assert text.endswith("<tool>rain<assistant>OK.<user>hello<assistant>hm<user>hello")
    assert prompt(ALTERNATING_BUT_CALLS, *HELLO, call("1"), *HELLO).endswith("}<assistant>OK.<user>hello")
    text = prompt(ALTERNATING_BUT_CALLS, *HELLO, call("1"), result, *HELLO, late)
    assert text.endswith("<tool>rain<assistant>OK.<user>hello\n\nHurry.")
    assert "OK." not in prompt(ALTERNATING_BUT_CALLS, *HELLO, call("1"), result)
    assert "OK." not in prompt(JSON_RESULTS, *HELLO, call("1"), result, *HELLO)


@pytest.mark.parametrize("tools", [[], [WEATHER]])
def test_a_history_cut_before_a_call_needs_no_user_first(tools: Any) -> None:
    """Clients that shorten a conversation may leave a call as its first message."""
    turns = [call("a"), said("tool", "rain", tool_call_id="a")]
    text = format_of("gemma").chat(turns, tools).text
    assert text.index("<start_of_turn>user") < text.index("Oslo") < text.index("rain")


def test_an_empty_answer_is_a_short_one_if_the_template_takes_none_and_results_stay_texts() -> None:
    result, empty = said("tool", "rain", tool_call_id="1"), said("assistant", "")
    text = prompt(ALTERNATING_BUT_CALLS, *HELLO, call("1"), result, empty, *HELLO)
    assert text.endswith("<tool>rain<assistant>OK.<user>hello")
    assert "OK." not in prompt(JSON_RESULTS, *HELLO, empty, *HELLO)


@pytest.mark.parametrize("name", ["qwen", "gpt-oss"])
def test_results_of_parallel_calls_have_the_order_of_the_calls(name: str) -> None:
    """Most templates write no ids, so a model tells results apart by their order."""
    calls = call("1") | {"tool_calls": [call(id)["tool_calls"][0] for id in "123"]}
    results = [said("tool", f"result {id}", tool_call_id=id) for id in "123"]
    later = [said("assistant", "hm"), call("4"), said("tool", "late", tool_call_id="4")]
    expected = format_of(name).chat([*HELLO, calls, *results, *later], [WEATHER]).text
    assert expected.index("result 1") < expected.index("result 2") < expected.index("result 3")
    assert format_of(name).chat([*HELLO, calls, *results[::-1], *later], [WEATHER]).text == expected


def test_joined_messages_keep_their_calls_and_reasoning() -> None:
    first, second = {**call("1"), "content": "", "reasoning_content": "hm"}, {**call("2"), "content": "then"}
    results = [said("tool", "a", tool_call_id="1"), said("tool", "b", tool_call_id="2")]
    (turn, *rest) = joined([first, second, *results])
    assert turn == {
        "role": "assistant",
        "content": "then",
        "reasoning_content": "hm",
        "tool_calls": first["tool_calls"] + second["tool_calls"],
    }
    assert rest == results


def test_ids_that_the_template_refuses_are_replaced() -> None:
    messages = [*HELLO, call("chatcmpl-tool-1"), said("assistant", "x"), call("abcdefgh1")]
    chat = format_of("mistral").chat(messages, [WEATHER])
    first, kept = (turn["tool_calls"][0]["id"] for turn in chat.messages if "tool_calls" in turn)
    assert first.isalnum()
    assert (len(first), kept) == (9, "abcdefgh1")
    assert format_of("mistral").chat(messages, [WEATHER]).text == chat.text
    assert '"call_7"' not in format_of("qwen").chat([*HELLO, call("call_7")], [WEATHER]).text


@pytest.mark.parametrize("arguments", ["{", "[1]", "null", None, "", "[" * 100_000, '{"a": 1} x'])
def test_arguments_that_are_no_object_are_empty(arguments: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "eagle_mlx.serve")
    id = f"bad_{hash(arguments)}"
    for _ in range(2):
        text = format_of("qwen").chat([*HELLO, call(id, arguments)], [WEATHER]).text
        assert '{"name": "get_weather", "arguments": {}}' in text
    assert sum(id in line for line in caplog.messages) == bool(arguments)


def test_calls_of_lfm2_are_in_the_content_because_its_templates_leave_them_out() -> None:
    template = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}{% for t in tools or [] %}{{ t }}"
    )
    chats = format_with_template(template + "{% endfor %}", ("<|tool_call_start|>", "<|tool_call_end|>"))
    calling = call("1", '{"city": "\\"Oslo\\"", "days": [1, null], "exact": true}')
    calling["tool_calls"] += call("2", "{}")["tool_calls"]
    calling["content"] = "Let me look."
    written = """[get_weather(city="\\"Oslo\\"", days=[1, None], exact=True), get_weather()]"""
    chat = chats.chat([*HELLO, calling, said("tool", "rain", tool_call_id="1"), *HELLO], [WEATHER])
    assert f"<assistant>Let me look.\n<|tool_call_start|>{written}<|tool_call_end|><tool>rain<user>" in chat.text
    parser = AnswerParser(chats, ToolOffer.of([WEATHER]))
    read = [
        delta.tool_call for delta in [*parser.push(chat.text.split("look.")[1].split("<tool>")[0]), *parser.finish()]
    ]
    assert [json.loads(piece.arguments) for piece in read if piece] == [
        {"city": '"Oslo"', "days": [1, None], "exact": True},
        {},
    ]


def test_content_may_be_missing_in_what_models_and_tools_wrote() -> None:
    empty = {"role": "assistant", "content": None}
    result = {"role": "tool", "content": None, "tool_call_id": "1"}
    assert prompt(JSON_RESULTS, *HELLO, empty, call("1"), result).endswith('tool:""')
