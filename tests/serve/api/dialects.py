"""One question in three APIs' formats, and their answers, whole and streamed, in a common form."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.serve.chat.formats import WEATHER

_FUNCTION: dict[str, Any] = WEATHER["function"]
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "n": {"enum": [1, 2, 3]}},
    "required": ["a", "n"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Question:
    messages: tuple[tuple[str, str], ...]
    """Role and text of each."""
    form: str = "text"
    """"text", "schema" or "tool"."""
    max_tokens: int = 24
    sampling: tuple[tuple[str, float], ...] = (("temperature", 0.0),)


@dataclass
class Answer:
    """What has been received of an answer."""

    text: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Name and arguments of each call."""
    has_ended: bool = False
    """Whether the API's own end was received. Without it, the answer was cut."""
    error: str = ""

    @property
    def said(self) -> str:
        """Return text and calls, without the white space in arguments."""
        return self.text + "".join(f"\n{name} {json.dumps(json.loads(given))}" for name, given in self.calls)


@dataclass(frozen=True)
class Dialect:
    name: str
    path: str
    body: Callable[[Question], dict[str, Any]]
    whole: Callable[[dict[str, Any]], Answer]
    take: Callable[[Answer, dict[str, Any]], None]
    """Adds an event of a stream to an answer."""


def _told(question: Question) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in question.messages]


def _chat_body(question: Question) -> dict[str, Any]:
    body = {"messages": _told(question), "max_tokens": question.max_tokens, **dict(question.sampling)}
    if question.form == "schema":
        form = {"name": "answer", "schema": _SCHEMA, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    if question.form == "tool":
        body |= {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    return body


def _chat_whole(answer: dict[str, Any]) -> Answer:
    message = answer["choices"][0]["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or []]
    return Answer(message["content"] or "", calls, answer["choices"][0]["finish_reason"] is not None)


def _chat_take(answer: Answer, event: dict[str, Any]) -> None:
    for choice in event.get("choices", ()):
        answer.text += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls") or ():
            if "id" in call:
                answer.calls.append([call["function"]["name"], ""])
            assert call["index"] == len(answer.calls) - 1
            answer.calls[-1][1] += call["function"]["arguments"]


def _messages_body(question: Question) -> dict[str, Any]:
    body = {"messages": _told(question), "max_tokens": question.max_tokens, **dict(question.sampling)}
    if question.form == "schema":
        body["output_config"] = {"format": {"type": "json_schema", "schema": _SCHEMA}}
    if question.form == "tool":
        named = {"name": _FUNCTION["name"], "description": _FUNCTION["description"]}
        body["tools"] = [{**named, "input_schema": _FUNCTION["parameters"]}]
        body["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    return body


def _messages_whole(answer: dict[str, Any]) -> Answer:
    text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
    calls = [[block["name"], json.dumps(block["input"])] for block in answer["content"] if block["type"] == "tool_use"]
    return Answer(text, calls, answer["stop_reason"] is not None)


def _messages_take(answer: Answer, event: dict[str, Any]) -> None:
    if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
        answer.calls.append([event["content_block"]["name"], ""])
    elif event["type"] == "content_block_delta":
        answer.text += event["delta"].get("text", "")
        if "partial_json" in event["delta"]:
            answer.calls[-1][1] += event["delta"]["partial_json"]
    elif event["type"] == "message_stop":
        answer.has_ended = True


def _responses_body(question: Question) -> dict[str, Any]:
    body = {"input": _told(question), "max_output_tokens": question.max_tokens, **dict(question.sampling)}
    if question.form == "schema":
        body["text"] = {"format": {"type": "json_schema", "name": "answer", "strict": True, "schema": _SCHEMA}}
    if question.form == "tool":
        tool = {"type": "function", **_FUNCTION}
        body |= {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    return body


def _responses_whole(answer: dict[str, Any]) -> Answer:
    messages = [item for item in answer["output"] if item["type"] == "message"]
    text = "".join(part["text"] for item in messages for part in item["content"])
    calls = [[item["name"], item["arguments"]] for item in answer["output"] if item["type"] == "function_call"]
    return Answer(text, calls, answer["status"] in ("completed", "incomplete"))


def _responses_take(answer: Answer, event: dict[str, Any]) -> None:
    kind = event["type"].removeprefix("response.")
    if kind == "output_text.delta":
        answer.text += event["delta"]
    elif kind == "output_item.added" and event["item"]["type"] == "function_call":
        answer.calls.append([event["item"]["name"], ""])
    elif kind == "function_call_arguments.delta":
        answer.calls[-1][1] += event["delta"]
    elif kind in ("completed", "incomplete"):
        whole = _responses_whole(event["response"])
        assert (whole.text, whole.calls) == (answer.text, answer.calls), event
        answer.has_ended = True
    elif kind == "failed":
        answer.error = json.dumps(event["response"]["error"])


CHAT = Dialect("Chat", "/v1/chat/completions", _chat_body, _chat_whole, _chat_take)
MESSAGES = Dialect("Messages", "/v1/messages", _messages_body, _messages_whole, _messages_take)
RESPONSES = Dialect("Responses", "/v1/responses", _responses_body, _responses_whole, _responses_take)
DIALECTS = (CHAT, MESSAGES, RESPONSES)


async def read(dialect: Dialect, lines: AsyncIterator[str], events: int | None = None) -> Answer:
    """Read an answer from the lines of its stream, up to a number of events with content if one is given."""
    answer, met = Answer(), 0
    async for line in lines:
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            answer.has_ended = True
            continue
        event = json.loads(line.removeprefix("data: "))
        if event.get("error"):
            answer.error = json.dumps(event["error"])
        dialect.take(answer, event)
        met += bool(answer.text or answer.calls)
        if events is not None and met >= events:
            break
    return answer
