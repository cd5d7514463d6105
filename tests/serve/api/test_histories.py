"""Histories that clients cannot repair, such as bad arguments or images, do not end a session in any API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eagle_mlx.serve.api.media import Pictures
from eagle_mlx.serve.api.schema import ChatMessage
from tests.serve.api.dialects import CHAT, MESSAGES, RESPONSES, Dialect
from tests.serve.api.live import Live

URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
PICTURES = {CHAT: URL, MESSAGES: BLOCK, RESPONSES: {"type": "input_image", "image_url": "data:image/png;base64,AA=="}}


def text(dialect: Dialect, words: str) -> dict[str, Any]:
    return {"type": "input_text" if dialect is RESPONSES else "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def called(dialect: Dialect, arguments: Any, result: Any = "rain") -> list[dict[str, Any]]:
    """Return a call and its result."""
    if dialect is CHAT:
        call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
        return [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": result},
        ]
    if dialect is MESSAGES:
        return [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": arguments}]},
            user({"type": "tool_result", "tool_use_id": "1", "content": result}),
        ]
    return [
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": arguments},
        {"type": "function_call_output", "call_id": "1", "output": result},
    ]


def post(server: Live, dialect: Dialect, turns: list[dict[str, Any]], **more: Any) -> Any:
    name, limit = ("input", "max_output_tokens") if dialect is RESPONSES else ("messages", "max_tokens")
    return server.http.post(dialect.path, json={name: turns, limit: 2, "temperature": 0, **more})


def prompt_tokens(answer: Any) -> int:
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    total: int = usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    return total


DIALECTS = pytest.mark.parametrize("dialect", [CHAT, MESSAGES, RESPONSES], ids=lambda dialect: dialect.name)


@DIALECTS
@pytest.mark.parametrize("arguments", ["{", "null", None, "[1]", {}])
def test_bad_arguments_of_earlier_calls_become_empty(caller: Live, dialect: Dialect, arguments: Any) -> None:
    ask = user(text(dialect, "look"))
    good: Any = {} if dialect is MESSAGES else "{}"
    expected = prompt_tokens(post(caller, dialect, [ask, *called(dialect, good), ask]))
    assert prompt_tokens(post(caller, dialect, [ask, *called(dialect, arguments), ask])) == expected


@DIALECTS
def test_an_image_in_the_history_becomes_a_note(caller: Live, dialect: Dialect) -> None:
    picture, ask = PICTURES[dialect], user(text(dialect, "what is this?"))
    answered = {"role": "assistant", "content": "I cannot see it."}
    plain = prompt_tokens(post(caller, dialect, [ask, answered, ask]))
    shown = user(text(dialect, "what is this?"), picture)
    assert prompt_tokens(post(caller, dialect, [shown, answered, ask])) > plain
    assert prompt_tokens(post(caller, dialect, [shown, ask])) > 0
    result = [text(dialect, "a picture:"), picture]
    assert prompt_tokens(post(caller, dialect, [ask, *called(dialect, "{}", result)])) > 0


@DIALECTS
def test_an_image_at_the_end_is_refused_until_more_is_said(caller: Live, dialect: Dialect) -> None:
    shown = user(text(dialect, "what is this?"), PICTURES[dialect])
    refused = post(caller, dialect, [user(text(dialect, "hi")), shown])
    assert refused.status_code == 400
    place = "input" if dialect is RESPONSES else "messages"
    assert f"{place}[1].content[1]: " in refused.json()["error"]["message"]
    assert "is not supported" in refused.json()["error"]["message"]
    shown["content"].append(text(dialect, "go on"))
    assert post(caller, dialect, [shown]).status_code == 200


@DIALECTS
def test_an_image_that_a_client_moves_from_a_result_to_the_user_becomes_a_note(caller: Live, dialect: Dialect) -> None:
    turns = [user(text(dialect, "look")), *called(dialect, "{}" if dialect is not MESSAGES else {})]
    picture = PICTURES[dialect]
    if dialect is MESSAGES:  # roles alternate there
        turns[-1]["content"].append(picture)
    else:
        turns += [user(picture), user(picture)]  # one for each of several results
    assert prompt_tokens(post(caller, dialect, turns)) > 0
    answered = {"role": "assistant", "content": "I cannot see it."}
    assert post(caller, dialect, [*turns, answered, user(picture)]).status_code == 400


@DIALECTS
@pytest.mark.parametrize("tools", [False, True])
def test_roles_that_the_template_refuses_are_changed(mistral: Live, dialect: Dialect, tools: bool) -> None:
    ask = user(text(dialect, "hello"))
    more: dict[str, Any] = {}
    if tools:
        tool = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
        more["tools"] = {
            CHAT: [{"type": "function", "function": tool}],
            MESSAGES: [{"name": "look", "input_schema": {"type": "object"}}],
            RESPONSES: [{"type": "function", **tool}],
        }[dialect]
    if dialect is MESSAGES:
        more["system"] = "Be brief."
    turns = [ask, ask] if dialect is MESSAGES else [{"role": "system", "content": "Be brief."}, ask, ask]
    assert prompt_tokens(post(mistral, dialect, turns, **more)) > 0


@DIALECTS
def test_half_a_surrogate_pair_in_a_history_becomes_a_replacement_character(caller: Live, dialect: Dialect) -> None:
    def sent(half: str, arguments: str) -> str:
        given: Any = {"word": half} if dialect is MESSAGES else arguments
        return json.dumps([user(text(dialect, f"look {half}")), *called(dialect, given)])

    def tokens(turns: str) -> int:
        name, limit = ("input", "max_output_tokens") if dialect is RESPONSES else ("messages", "max_tokens")
        body = f'{{"{name}": {turns}, "{limit}": 2}}'
        return prompt_tokens(caller.http.post(dialect.path, content=body, headers={"content-type": "application/json"}))

    expected = tokens(sent("\ufffd", '{"word": "\ufffd"}'))
    assert tokens(sent("\ud83d", '{"word": "\\ud83d"}')) == expected
    assert tokens(sent("\ude00", '{"word": "\\ude00"}')) == expected
    assert tokens(sent("\\ud83d", '{"word": "\\\\ud83d"}')) > expected  # a backslash and letters


EMPTY: dict[Dialect, list[dict[str, Any]]] = {
    CHAT: [{"role": "assistant", "content": None}, {"role": "assistant", "content": []}],
    MESSAGES: [{"role": "assistant", "content": None}, {"role": "assistant", "content": []}],
    RESPONSES: [{"role": "assistant", "content": None}, {"role": "assistant", "content": []}, {"type": "reasoning"}],
}


@DIALECTS
def test_an_empty_answer_can_be_sent_back(caller: Live, dialect: Dialect) -> None:
    ask = user(text(dialect, "hi"))
    for answer in EMPTY[dialect]:
        assert prompt_tokens(post(caller, dialect, [ask, answer, ask])) > 0
    refused = post(caller, dialect, [ask, {"role": "user", "content": None}])
    assert refused.status_code == 400
    assert "[1].content: must be text" in refused.json()["error"]["message"]


def test_what_tools_of_other_servers_did_becomes_a_note(caller: Live) -> None:
    search: dict[str, Any] = {"type": "web_search_call", "id": "a", "status": "completed", "action": {}}
    result = {"type": "web_search_tool_result", "tool_use_id": "a", "content": []}
    use = {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}
    programs = [{"type": name, "id": "a"} for name in ("program", "program_output", "additional_tools")]
    for dialect, turns in (
        (RESPONSES, [search]),
        (RESPONSES, programs),
        (MESSAGES, [{"role": "assistant", "content": [use, result]}]),
    ):
        ask = user(text(dialect, "hi"))
        plain = prompt_tokens(post(caller, dialect, [ask, {"role": "assistant", "content": ""}, ask]))
        assert prompt_tokens(post(caller, dialect, [ask, *turns, ask])) > plain
        assert post(caller, dialect, [ask, {"type": "poem", "role": "poem"}]).status_code == 400


def test_thoughts_may_be_parts_of_a_message() -> None:
    for thinking in ("hm", [{"type": "text", "text": "hm"}]):
        parts = [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": "Yes."}]
        message = ChatMessage.model_validate({"role": "assistant", "content": parts})
        assert message.plain(Pictures(), "messages[0]") == {
            "role": "assistant",
            "content": "Yes.",
            "reasoning_content": "hm",
        }


def test_fields_that_other_servers_and_gateways_add_are_taken(caller: Live) -> None:
    answered = {
        "role": "assistant",
        "content": "hm",
        "id": "msg_1",
        "reasoning_details": [{"type": "reasoning.text", "text": "hm"}],
        "thinking_blocks": [{"type": "thinking", "thinking": "hm"}],
        "annotations": [{"type": "url_citation"}],
    }
    turns = [
        user({"type": "text", "text": "hi", **EPHEMERAL}) | EPHEMERAL,
        answered,
        user({"type": "text", "text": "x"}),
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    answer = post(caller, CHAT, turns, tools=[tool | EPHEMERAL])
    assert answer.status_code == 200, answer.text
    assert prompt_tokens(answer) == prompt_tokens(post(caller, CHAT, json.loads(json.dumps(turns)), tools=[tool]))
