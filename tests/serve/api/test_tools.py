"""Tools, schemas and thoughts over HTTP, whole and streamed alike."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.api.live import NAME, Live
from tests.serve.chat.formats import WEATHER

USER: Any = [{"role": "user", "content": "How is the weather in Oslo?"}]


def streamed(server: Live, asked: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The message that the pieces make up, and why it ended."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = ""
    for chunk in server.openai.chat.completions.create(**asked, stream=True):
        delta = chunk.choices[0].delta.model_dump()
        message["content"] += delta["content"] or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta["tool_calls"] or []:
            assert call.pop("index") == len(message["tool_calls"])
            message["tool_calls"].append(call)
        reason = chunk.choices[0].finish_reason or reason
    return message, reason


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_must_be_made_is(caller: Live, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": NAME,
        "messages": USER,
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 300,
        "seed": 5,
    }
    answer = caller.openai.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    calls: Any = answer.message.tool_calls
    assert len(calls) == 1
    assert calls[0].function.name == "get_weather"
    assert set(json.loads(calls[0].function.arguments)) >= set(WEATHER["function"]["parameters"]["required"])
    message, reason = streamed(caller, asked)
    assert reason == "tool_calls"
    assert message["content"] == ""
    assert [call["function"] for call in message["tool_calls"]] == [call.function.model_dump() for call in calls]
    assert message["tool_calls"][0]["id"]

    # The next turn of the conversation, as clients send it.
    again = [*USER, answer.message, {"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"}]
    after = caller.openai.chat.completions.create(model=NAME, messages=again, tools=[WEATHER], max_tokens=4)
    assert after.choices[0].finish_reason in ("length", "stop")


def test_thoughts_are_apart(thinker: Live) -> None:
    asked: dict[str, Any] = {
        "model": NAME,
        "messages": USER,
        "max_tokens": 60,
        "seed": 3,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    }
    thinking = thinker.openai.chat.completions.create(**asked).choices[0]
    assert thinking.message.reasoning_content  # type: ignore[attr-defined]
    assert not thinking.message.content
    message, reason = streamed(thinker, asked)
    assert message["reasoning_content"] == thinking.message.reasoning_content  # type: ignore[attr-defined]
    assert reason == thinking.finish_reason == "length"
    asked["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    plain = thinker.openai.chat.completions.create(**asked).choices[0].message
    assert plain.content
    assert not hasattr(plain, "reasoning_content")


def test_a_schema_that_cannot_be_kept_fails_alone(thinker: Live) -> None:
    schema = {"type": "string", "pattern": "(?<=a)b"}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"a": schema}}},
    }
    answer = thinker.http.post("/v1/chat/completions", json={"messages": USER, "response_format": form})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    asked = {"messages": USER, "max_tokens": 3}
    assert thinker.http.post("/v1/chat/completions", json=asked).status_code == 200
