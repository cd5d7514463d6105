"""Answers joined from events equal the whole answer, for any number of tokens per event."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx.request import Output
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.serve.api.chat import DeltaStream, EncodedChat
from eagle_mlx.serve.api.conversation import PendingParts
from eagle_mlx.serve.api.messages import MessagesRequest, PendingMessage
from eagle_mlx.serve.api.responses import PendingResponse
from eagle_mlx.serve.api.responses_request import Functions, ResponsesRequest
from eagle_mlx.serve.api.schema import ChatRequest
from eagle_mlx.serve.api.service import Call, ModelSource, Service
from eagle_mlx.serve.api.worker import RequestEvent
from eagle_mlx.serve.chat import AnswerParser, ToolOffer
from tests.full import some
from tests.serve.api.live import loaded_format, wide
from tests.serve.chat.formats import CALL, CLOCK, WEATHER

USER: Any = [{"role": "user", "content": "hi"}]
BODY = ChatRequest.model_validate({"messages": USER})
WRITTEN = f"<think>\nhm, é漢\n</think>\n\nso\n{CALL}\n{CALL}\n over"


@pytest.fixture(scope="module")
def written() -> tuple[EncodedChat, Output]:
    """A chat whose answer has parts of every kind, as a model would write it."""
    loaded = loaded_format("thinking")
    prepared = loaded.engine.prepare([5], SamplingParams(max_tokens=500)).request
    request = RequestState(prepared, tokens=loaded.tokenizer.encode(WRITTEN, add_special_tokens=False))
    request.finish("stop")
    offer = ToolOffer.of([WEATHER, CLOCK])
    chat = EncodedChat(BODY, loaded, [request], lambda: AnswerParser(loaded.chat, offer))
    return chat, request.output(loaded.tokenizer)


@settings(max_examples=some(40), deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_streamed_pieces_equal_the_whole_answer(written: tuple[EncodedChat, Output], sizes: list[int]) -> None:
    """Check both APIs, with any number of tokens per event."""
    chat, output = written
    tokens, at, index, events = output.tokens, 0, 0, []
    while at < len(tokens):
        size = sizes[index % len(sizes)]
        at, index = at + size, index + 1
        events.append(RequestEvent(0, tokens[at - size : at], output=output if at >= len(tokens) else None))
    body_of_messages = MessagesRequest.model_validate({"messages": USER, "max_tokens": 500})
    body = ResponsesRequest.model_validate({"input": "x", "store": False})
    call = Call(Service(wide(), ModelSource("tiny", lambda: chat.loaded)), 1, "")
    pairs: list[tuple[Callable[[], PendingParts], Any]] = [
        (lambda: PendingMessage(call, body_of_messages, BODY), blocks_of),
        (lambda: PendingResponse(call, body, (BODY, Functions(), (), ()), lambda _: None), items_of),
    ]
    for make, put_together in pairs:
        writer, other = make().answer(chat), make().answer(chat)
        text = writer.open() + "".join(map(writer.write, events)) + writer.close(0, output, {})
        streamed = [json.loads(event.split("data: ", 1)[1]) for event in text.split("\n\n")[:-1]]
        whole = other.response([output])
        assert put_together(streamed) == without_ids(whole.get("content") or whole["output"])
    message = PendingMessage(call, body_of_messages, BODY).answer(chat).response([output])
    kinds = [block["type"] for block in message["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use", "text"]


def test_a_thought_without_its_end_tag_has_at_most_the_tokens_of_the_answer() -> None:
    loaded = loaded_format("thinking")
    encode = partial(loaded.tokenizer.encode, add_special_tokens=False)
    broken = 97  # a token of a part of a character, whose replacement takes three tokens
    assert len(encode(loaded.tokenizer.decode([broken]))) == 3
    tokens = [*encode("<think>\n"), *30 * [broken], *encode(CALL)]
    prepared = loaded.engine.prepare([5], SamplingParams(max_tokens=500)).request
    request = RequestState(prepared, tokens=tokens)
    request.finish("stop")
    offer = ToolOffer.of([WEATHER, CLOCK])
    stream = DeltaStream(EncodedChat(BODY, loaded, [request], lambda: AnswerParser(loaded.chat, offer)))
    output = request.output(loaded.tokenizer)
    deltas = stream.push(RequestEvent(0, (), output=output))
    assert [bool(delta.reasoning) for delta in deltas] == [True, False]
    assert 30 <= stream.thought_tokens(output) <= len(tokens)


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            (field,) = delta.keys() - {"type"}
            key = "json" if field == "partial_json" else field
            blocks[-1][key] += delta[field]
    for block in blocks:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return without_ids(blocks)


def items_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items built only from deltas, with other fields as they were when an item was added."""
    items: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "response.output_item.added":
            items.append(event["item"])
        elif event["type"] == "response.content_part.added":
            items[-1]["content"].append(event["part"])
        elif event["type"] == "response.function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif event["type"].endswith("text.delta"):
            items[-1]["content"][0]["text"] += event["delta"]
        elif event["type"] == "response.output_item.done":
            items[-1]["status"] = event["item"]["status"]
    return without_ids(items)


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]
