"""Answers that continue the last message, in every API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.full import diagonal
from tests.serve.api.dialects import CHAT, MESSAGES, RESPONSES, Dialect
from tests.serve.api.live import Live, live, loaded_format
from tests.serve.chat.formats import format_of

USER: Any = {"role": "user", "content": "How is the weather?"}
DIALECTS = pytest.mark.parametrize("dialect", [CHAT, MESSAGES, RESPONSES], ids=lambda dialect: dialect.name)
TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}


def partial(dialect: Dialect, content: str = "", reasoning: str = "") -> list[dict[str, Any]]:
    """Return the beginning of an answer in an API's form."""
    if dialect is CHAT:
        return [{"role": "assistant", "content": content, **({"reasoning_content": reasoning} if reasoning else {})}]
    if dialect is MESSAGES:
        blocks = [{"type": "thinking", "thinking": reasoning, "signature": ""}] if reasoning else []
        return [{"role": "assistant", "content": blocks + ([{"type": "text", "text": content}] if content else [])}]
    status = {"status": "incomplete"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": reasoning}], **status}
    message = {"role": "assistant", "content": [{"type": "output_text", "text": content}], **status}
    return ([thought] if reasoning else []) + ([message] if content else [])


def body(dialect: Dialect, turns: list[dict[str, Any]], limit: int = 24, **more: Any) -> dict[str, Any]:
    names = ("input", "max_output_tokens") if dialect is RESPONSES else ("messages", "max_tokens")
    fields = dict(zip(names, (turns, limit), strict=True)) | {"temperature": 0, **more}
    return fields | (
        {"continue_final_message": True} if dialect is CHAT and "continue_final_message" not in more else {}
    )


def said(server: Live, dialect: Dialect, fields: dict[str, Any]) -> tuple[str, str]:
    """Return reasoning and content of an answer, which are the same whole and streamed."""
    whole = server.http.post(dialect.path, json=fields)
    assert whole.status_code == 200, whole.text
    answer = whole.json()
    lines = server.http.post(dialect.path, json=fields | {"stream": True}).text.split("\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    events = [json.loads(event) for event in data if event != "[DONE]"]
    if dialect is CHAT:
        message = answer["choices"][0]["message"]
        texts = (message.get("reasoning_content", ""), message["content"] or "")
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        streamed = tuple("".join(delta.get(key) or "" for delta in deltas) for key in ("reasoning_content", "content"))
    elif dialect is MESSAGES:
        parts = answer["content"]
        texts = tuple("".join(part.get(key, "") for part in parts) for key in ("thinking", "text"))  # type: ignore[assignment]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        streamed = tuple("".join(delta.get(key, "") for delta in deltas) for key in ("thinking", "text"))
    else:
        parts = [part for item in answer["output"] for part in item["content"]]
        kinds = ("reasoning_text", "output_text")
        texts = tuple("".join(part["text"] for part in parts if part["type"] == kind) for kind in kinds)  # type: ignore[assignment]
        streamed = tuple(
            "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta") for kind in kinds
        )
    assert streamed == texts
    return texts


def completed(server: Live, messages: list[dict[str, Any]], **more: Any) -> tuple[str, str]:
    """Return the prompt of a chat that ends within its last message, and the text that completes it."""
    loaded = server.service.loaded
    assert loaded is not None
    chat = loaded.chat.chat(messages, continued=True)
    fields = {"prompt": chat.tokens(), "max_tokens": 24, "temperature": 0, **more}
    return chat.text, server.http.post("/v1/completions", json=fields).json()["choices"][0]["text"]


@pytest.mark.parametrize(
    ("dialect", "content"),
    diagonal([CHAT, MESSAGES, RESPONSES], ["def f(x):\n    return", "It rains  ", "<"]),
    ids=lambda value: getattr(value, "name", None),
)
def test_an_answer_continues_the_last_message(server: Live, dialect: Dialect, content: str) -> None:
    prompt, text = completed(server, [USER, *partial(CHAT, content)])
    assert prompt.endswith(content)
    assert said(server, dialect, body(dialect, [USER, *partial(dialect, content)])) == ("", text)
    fields = body(dialect, [USER, *partial(dialect, content)], spec_decode="none")
    assert said(server, dialect, fields) == ("", text)


@DIALECTS
def test_an_answer_continues_after_its_reasoning(thinker: Live, dialect: Dialect) -> None:
    prompt, _ = completed(thinker, [USER, *partial(CHAT, "It is", "a thought")])
    assert prompt.endswith("<think>\na thought\n</think>\n\nIt is")
    reasoning, content = said(thinker, dialect, body(dialect, [USER, *partial(dialect, "It is", "a thought")]))
    assert content
    assert not reasoning


@DIALECTS
def test_a_thought_is_continued(thinker: Live, dialect: Dialect) -> None:
    prompt, text = completed(thinker, [USER, *partial(CHAT, "", "Let me")])
    assert prompt.endswith("<think>\nLet me")
    fields = body(dialect, [USER, *partial(dialect, "", "Let me")])
    assert said(thinker, dialect, fields) == (text, "")
    assert said(thinker, CHAT, body(CHAT, [USER, *partial(CHAT, "<think>\nLet me")])) == (text, "")


@pytest.fixture(scope="module")
def caching() -> Iterator[Live]:
    """A server with a prefix cache."""
    with live(lambda: loaded_format("thinking", prefix_cache_bytes=1 << 24)) as running:
        yield running


@DIALECTS
def test_the_prefix_cache_serves_continued_answers(dialect: Dialect, caching: Live) -> None:
    words = f"{dialect.name}: " + "a long beginning of an answer " * 8
    fields = body(dialect, [USER, *partial(dialect, words)])

    def cached(turns: dict[str, Any]) -> int:
        usage = caching.http.post(dialect.path, json=turns).raise_for_status().json()["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        count: int = details.get("cached_tokens", usage.get("cache_read_input_tokens"))
        return count

    reasoning, content = said(caching, dialect, fields)
    assert cached(fields) > 40
    assert said(caching, dialect, fields) == (reasoning, content)
    answered = {"role": "assistant", "content": words + content}
    assert cached(body(dialect, [USER, answered, USER], continue_final_message=False)) > 40


def test_the_last_question_is_a_boundary_of_a_continued_answer() -> None:
    format = format_of("thinking")
    chat = format.chat([USER, *partial(CHAT, "It is")], continued=True)
    tokens = chat.tokens()
    ends = [chat.tokenizer.decode(tokens[:end]) for end in chat.boundaries(tokens)]
    assert any(end.endswith("<|im_end|>\n") for end in ends)
    assert ends[-1].endswith("assistant\n")


@DIALECTS
def test_a_message_that_cannot_be_continued_is_refused(caller: Live, dialect: Dialect) -> None:
    call = {
        CHAT: {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "look", "arguments": "{}"}}]},
        MESSAGES: {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
        RESPONSES: {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
    }[dialect]
    empty = {"role": "assistant", "content": " ", **({"status": "incomplete"} if dialect is RESPONSES else {})}
    schema = {"type": "object"}
    form: dict[str, Any] = {
        CHAT: {"response_format": {"type": "json_object"}},
        MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        RESPONSES: {"text": {"format": {"type": "json_object"}}},
    }[dialect]
    cases = [
        (body(dialect, [USER, empty]), "nothing to continue"),
        (body(dialect, [USER, *partial(dialect, "{")], **form), "cannot be continued with a schema"),
        (body(dialect, [USER], continue_final_message=True), "only a message of the assistant"),
        (body(dialect, [USER, call], continue_final_message=True), "a message with calls cannot be continued"),
    ]
    for fields, reason in cases:
        answer = caller.http.post(dialect.path, json=fields)
        assert answer.status_code == 400, (fields, answer.text)
        assert reason in answer.json()["error"]["message"]


def test_chats_begin_another_answer_unless_they_ask_to_continue(server: Live) -> None:
    turns = [USER, *partial(CHAT, "def f(x):")]
    continued = said(server, CHAT, body(CHAT, turns))
    assert said(server, CHAT, body(CHAT, turns, continue_final_message=False)) != continued
    assert said(server, CHAT, body(CHAT, turns, add_generation_prompt=False)) == continued
    both = server.http.post(CHAT.path, json=body(CHAT, turns, add_generation_prompt=True))
    assert both.status_code == 400
    assert "add_generation_prompt" in both.json()["error"]["message"]
    whole = [USER, {"role": "assistant", "content": "def f(x):", "status": "completed"}]
    assert said(server, RESPONSES, body(RESPONSES, whole)) != continued
    count = {"messages": [USER, *partial(MESSAGES, "def f(x):")]}
    counted = server.http.post(f"{MESSAGES.path}/count_tokens", json=count).json()["input_tokens"]
    assert counted == server.http.post(CHAT.path, json=body(CHAT, turns)).json()["usage"]["prompt_tokens"]


def test_a_template_that_cannot_continue_is_refused(mistral: Live) -> None:
    fields = body(CHAT, [USER, *partial(CHAT, "", "only a thought")])
    answer = mistral.http.post(CHAT.path, json=fields)
    assert answer.status_code == 400
    assert "does not write it so that it can be continued" in answer.json()["error"]["message"]
