"""Anthropic Messages API answers: the text of Chat Completions in Anthropic's events and fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from eagle_mlx.serve.api.limits import Limits
from eagle_mlx.serve.api.model import Loaded
from tests.full import diagonal
from tests.serve.api.given import TARGET
from tests.serve.api.live import DEPTH, NAME, Live, engine, live, wide
from tests.serve.chat.formats import WEATHER

URL, COUNT, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"
USER: Any = [{"role": "user", "content": "def f(x):"}]
TURNS: Any = [*USER, {"role": "assistant", "content": "return x"}, {"role": "user", "content": "def g(x):"}]
FUNCTION = WEATHER["function"]
TOOL: Any = {"name": FUNCTION["name"], "description": "Rain or sun.", "input_schema": FUNCTION["parameters"]}
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0}


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.base, api_key="none", max_retries=0) as client:
        yield client


def ask(server: Live, **body: Any) -> dict[str, Any]:
    answer = server.http.post(URL, json=body)
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()
    return message


def events(server: Live, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream; each one's name is its type."""
    pieces = server.http.post(URL, json={**body, "stream": True}).text.split("\n\n")
    assert pieces.pop() == ""
    named = [piece.split("\n") for piece in pieces]
    bodies = [json.loads(data.removeprefix("data: ")) for _, data in named]
    assert [name.removeprefix("event: ") for name, _ in named] == [event["type"] for event in bodies]
    return bodies


def streamed(stream: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the blocks that events build, and the last event but one. Check the order of events.

    A slow model's stream has pings in any place.
    """
    assert [event["type"] for event in stream[:2]] == ["message_start", "ping"]
    stream = stream[:2] + [event for event in stream[2:] if event["type"] != "ping"]
    assert [event["type"] for event in stream[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in stream[2:-2]:
        kind = event["type"]
        assert is_open == (kind != "content_block_start")
        if kind == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif kind == "content_block_delta":
            field = {"input_json_delta": "partial_json"}.get(event["delta"]["type"], event["delta"]["type"][:-6])
            blocks[-1][field] = blocks[-1].get(field, "") + event["delta"][field]
        assert event["index"] == len(blocks) - 1
        is_open = kind != "content_block_stop"
    for block in blocks:
        if "partial_json" in block:
            block["input"] = json.loads(block.pop("partial_json"))
    return blocks, stream[-2]


@pytest.mark.parametrize(
    ("messages", "sampling"),
    diagonal([USER, TURNS], [{"temperature": 0}, {"temperature": 0.9, "seed": 7}, {"top_k": 9, "seed": 8}]),
)
def test_the_text_is_that_of_chat_completions(server: Live, messages: Any, sampling: dict[str, Any]) -> None:
    fields = {"messages": [{"role": "system", "content": "Be brief."}, *messages], "max_tokens": 24, **sampling}
    chat = server.http.post(CHAT, json=fields).json()
    message = ask(server, messages=messages, system="Be brief.", max_tokens=24, **sampling)
    assert message["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    ended = {"length": "max_tokens", "stop": "end_turn"}[chat["choices"][0]["finish_reason"]]
    assert (message["stop_reason"], message["stop_sequence"]) == (ended, None)
    assert message["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
    blocks, last = streamed(events(server, messages=messages, system="Be brief.", max_tokens=24, **sampling))
    assert blocks == message["content"]
    assert last["delta"] == {"stop_reason": ended, "stop_sequence": None}


def test_the_official_client_reads_whole_and_streamed_answers(client: anthropic.Anthropic) -> None:
    fields: Any = {"model": NAME, "messages": USER, "max_tokens": 24, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 1
    assert "".join(pieces) == whole.content[0].text  # type: ignore[union-attr]
    assert final.content[0].text == "".join(pieces)  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert final.stop_reason == ("max_tokens" if final.usage.output_tokens == 24 else "end_turn")
    counted = client.messages.count_tokens(model=NAME, messages=USER)
    for usage in (whole.usage, final.usage):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens


def test_answers_match_the_official_types(server: Live) -> None:
    Message.model_validate(ask(server, messages=USER, **GREEDY), strict=True)
    adapter: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
    for event in events(server, messages=USER, **GREEDY):
        if event["type"] != "ping":
            adapter.validate_python(event)


def test_a_stop_sequence_is_reported_with_its_text(server: Live) -> None:
    text = ask(server, messages=USER, max_tokens=40, temperature=0)["content"][0]["text"]
    stop = text[len(text) // 2 :][:5]
    fields = {"messages": USER, "max_tokens": 40, "temperature": 0, "stop_sequences": ["nay", stop]}
    message = ask(server, **fields)
    assert message["content"][0]["text"] == text[: text.find(stop)]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    blocks, last = streamed(events(server, **fields))
    assert blocks == message["content"]
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}


def test_max_tokens_may_exceed_the_context(server: Live) -> None:
    """Agents request tens of thousands of tokens from any model."""
    message = ask(server, messages=USER, max_tokens=64_000, temperature=0)
    usage = message["usage"]
    used = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"]
    assert used <= 512
    assert message["stop_reason"] == ("model_context_window_exceeded" if used == 512 else "end_turn")
    assert TARGET is not None or used == 512  # a random model never ends its turn
    assert ask(server, messages=USER, max_tokens=1)["stop_reason"] == "max_tokens"


def test_counted_tokens_equal_the_prompt_tokens() -> None:
    made = engine(prefix_cache_bytes=1 << 24)
    with live(lambda: Loaded(made, "ngram", DEPTH, {"temperature": 0.0})) as server:
        check_counts(server)


def check_counts(server: Live) -> None:
    fields = {"messages": [{"role": "user", "content": "count these " * 9}], "system": "New here: " + "9" * 40}
    counted = server.http.post(COUNT, json=fields).json()
    assert counted == {"input_tokens": ask(server, **fields, max_tokens=1)["usage"]["input_tokens"]}
    usage = ask(server, **fields, max_tokens=1)["usage"]
    assert usage["cache_read_input_tokens"] > 20
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]
    assert usage["cache_creation_input_tokens"] == 0
    first = events(server, **fields, max_tokens=1)
    assert first[0]["message"]["usage"]["input_tokens"] == counted["input_tokens"]
    assert first[-2]["usage"] == usage
    long = {"messages": [{"role": "user", "content": "x " * 999}]}
    assert server.http.post(COUNT, json=long).json()["input_tokens"] > 512


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_is_called_and_its_result_goes_back(caller: Live, choice: dict[str, Any]) -> None:
    weather = [{"role": "user", "content": "How is the weather in Oslo?"}]
    free = {"messages": weather, "tools": [TOOL], "max_tokens": 300, "seed": 5}
    fields: dict[str, Any] = {**free, "tool_choice": choice | {"disable_parallel_tool_use": True}}
    message = ask(caller, **fields)
    (call,) = message["content"]
    assert (call["type"], call["name"], message["stop_reason"]) == ("tool_use", "get_weather", "tool_use")
    assert set(call["input"]) >= set(FUNCTION["parameters"]["required"])
    (block,), last = streamed(events(caller, **fields))
    assert block | {"id": call["id"]} == call
    assert last["delta"]["stop_reason"] == "tool_use"
    # The next turn has the same prompt as in Chat Completions.
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "sunny"}]}
    again = [*weather, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    function = {"name": call["name"], "arguments": json.dumps(call["input"])}
    told = [
        *weather,
        {"role": "assistant", "content": "", "tool_calls": [{"id": call["id"], "function": function}]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]
    offered = {"type": "function", "function": {**FUNCTION, "description": TOOL["description"]}}
    chat = {"messages": told, "tools": [offered], "max_tokens": 9, "seed": 5}
    completion = caller.http.post(CHAT, json=chat).json()
    answer = ask(caller, **free | {"messages": again, "max_tokens": 9})
    assert answer["content"][0]["text"] == completion["choices"][0]["message"]["content"]
    used = answer["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == completion["usage"]["prompt_tokens"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_forced_call_follows_an_assistants_message_at_the_end(caller: Live, choice: dict[str, Any]) -> None:
    """LangGraph's agents with ChatAnthropic ask this way for a structured response, after the agent's last message."""
    turns = [*USER, {"role": "assistant", "content": "It is sunny in Oslo."}]
    forced = {"messages": turns, "tools": [TOOL], "tool_choice": choice | {"disable_parallel_tool_use": True}}
    message = ask(caller, **forced, max_tokens=300, seed=5)
    (call,) = message["content"]
    assert (call["type"], call["name"], message["stop_reason"]) == ("tool_use", "get_weather", "tool_use")
    offered = {"type": "function", "function": {**FUNCTION, "description": TOOL["description"]}}
    chat = {"messages": turns, "tools": [offered], "max_tokens": 1}
    prompt_tokens = caller.http.post(CHAT, json=chat).json()["usage"]["prompt_tokens"]
    assert caller.http.post(COUNT, json=forced).json()["input_tokens"] == prompt_tokens
    answer = caller.http.post(URL, json=forced | {"max_tokens": 9, "continue_final_message": True})
    assert (answer.status_code, "a forced call" in answer.text) == (400, True)


def test_thinking_blocks_can_be_sent_back(thinker: Live) -> None:
    fields = {"messages": USER, "max_tokens": 40, "seed": 3, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    template = {"chat_template_kwargs": {"enable_thinking": True}}
    chat = thinker.http.post(CHAT, json={"messages": USER, "max_tokens": 40, "seed": 3, **template}).json()
    message = ask(thinker, **fields)
    (thought,) = message["content"]
    assert (thought["type"], bool(thought["signature"])) == ("thinking", True)
    assert thought["thinking"] == chat["choices"][0]["message"]["reasoning_content"]
    (block,), _ = streamed(events(thinker, **fields))
    assert block["thinking"] == thought["thinking"]
    assert block["signature"]
    hidden = fields | {"thinking": {"type": "adaptive", "display": "omitted"}}
    assert (
        ask(thinker, **hidden)["content"][0]["thinking"] == streamed(events(thinker, **hidden))[0][0]["thinking"] == ""
    )
    assert ask(thinker, **fields | {"thinking": {"type": "disabled"}})["content"][0]["type"] == "text"
    # The prompt of the next turn contains the reasoning.
    redacted = {"type": "redacted_thinking", "data": "EmwK"}
    back = [*USER, {"role": "assistant", "content": [thought, redacted, {"type": "text", "text": "y"}]}, *USER]
    reasoning = {"role": "assistant", "content": "y", "reasoning_content": thought["thinking"]}
    tokens = thinker.http.post("/tokenize", json={"messages": [*USER, reasoning, *USER]}).json()["count"]
    assert thinker.http.post(COUNT, json={"messages": back}).json()["input_tokens"] == tokens


def test_an_answer_follows_a_schema(server: Live) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": schema | {"additionalProperties": False}}
    for fields in ({"output_config": {"format": form, "effort": "max"}}, {"output_format": form}):
        message = ask(server, messages=USER, max_tokens=60, seed=1, **fields)
        assert json.loads(message["content"][0]["text"])["a"] in ("x", "y")
        assert message["stop_reason"] == "end_turn"


def test_a_client_that_disconnects_frees_its_row(server: Live) -> None:
    body = {"messages": USER, "max_tokens": 400, "stream": True, "temperature": 0}
    with server.slowed(0.05):
        with server.http.stream("POST", URL, json=body) as answer:
            pieces = answer.iter_text()  # closes the stream once nothing refers to it
            next(pieces)
            server.until(lambda: server.service.running > 0)
        assert not server.idle
    assert server.until(lambda: server.idle) < 1.0


def test_keys_are_accepted_in_the_header_of_anthropics_clients() -> None:
    with live(settings=wide(Limits(), api_key="secret")) as server:
        for headers, status in [({"x-api-key": "secret"}, 200), ({"x-api-key": "wrong"}, 401), ({}, 401)]:
            answer = server.http.post(
                URL, json={"messages": USER, "max_tokens": 1}, headers={"Authorization": ""} | headers
            )
            assert answer.status_code == status
        assert answer.json()["error"]["type"] == "authentication_error"
        with anthropic.Anthropic(base_url=server.base, api_key="secret") as client:
            assert client.messages.create(model=NAME, messages=USER, max_tokens=1).usage.output_tokens == 1
