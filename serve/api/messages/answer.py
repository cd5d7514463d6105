"""POST /v1/messages and count_tokens: answers as a message or as a stream of events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring as quote
from typing import Any, Literal

from fastapi import APIRouter, Request
from sse_starlette import ServerSentEvent
from starlette.responses import Response

from eagle_mlx.request import Output
from eagle_mlx.request_state import RequestState

from ..answer import Kind, Measured, Part, named_event, part_of, parts_of, stats, stream_answers
from ..chat import ChatAnswer, DeltaStream, finish_reason, prepare_chat, read_prompt
from ..conversation import named_as
from ..errors import ERRORS, EVENTS, ApiError, ContextExceeded, MessagesError, Shape, documented
from ..flow import body_of, client_of, in_thread, json_response, models_of, respond, unless_disconnected
from ..model import Loaded, check
from ..service import Call
from ..worker import RequestEvent
from .schema import CountTokensRequest, MessagesRequest
from .translate import FIELDS, chat_request, tool_places

PING = 'event: ping\ndata: {"type":"ping"}\n\n'
_DELTAS: dict[Kind, tuple[str, str]] = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}


class MessageOutputDetails(Shape):
    thinking_tokens: int


class MessageUsage(Shape):
    """Anthropic's counts; `input_tokens` excludes cached tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageOutputDetails
    service_tier: Literal["standard"]


class MessageTextBlock(Shape):
    type: Literal["text"]
    text: str


class MessageThinkingBlock(Shape):
    type: Literal["thinking"]
    thinking: str
    signature: str


class MessageToolUseBlock(Shape):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageObject(Measured):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageTextBlock | MessageThinkingBlock | MessageToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Shape):
    input_tokens: int


@dataclass(frozen=True)
class MessageAnswer:
    """A prepared chat to be answered with a message."""

    body: MessagesRequest
    chat: ChatAnswer

    @property
    def requests(self) -> Sequence[RequestState]:
        return self.chat.requests

    @property
    def hides_thoughts(self) -> bool:
        return self.body.thinking is not None and self.body.thinking.display == "omitted"

    def response(self, call: Call, outputs: Sequence[Output]) -> dict[str, Any]:
        (output,) = outputs
        parts = parts_of(self.chat.deltas(output))
        content = [self._block(call, part) for part in parts]
        ended = self.ended(output, any(part.kind == "call" for part in parts))
        return self.message(call, content, self.usage(output)) | ended | stats(call, outputs)

    def stream(self, call: Call) -> AsyncIterator[bytes]:
        return stream_answers(call, [MessageWriter(self, call)], _error_event)

    def message(self, call: Call, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """Return a message that has not ended."""
        return {
            "id": f"msg_{call.id}",
            "type": "message",
            "role": "assistant",
            "model": call.service.name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def usage(self, output: Output) -> dict[str, Any]:
        return MessageUsage(
            input_tokens=output.prompt_tokens - output.cached_tokens,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=output.cached_tokens,
            output_tokens=len(output.tokens),
            output_tokens_details=MessageOutputDetails(thinking_tokens=self.chat.thought_tokens(output)),
            service_tier="standard",
        ).plain()

    def ended(self, output: Output, calls: bool) -> dict[str, Any]:
        """Return why a message ended."""
        reason = finish_reason(output, calls)
        if reason == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if reason == "length":
            by_context = len(output.tokens) < self.body.max_tokens and output.cut_off is None
            why = "model_context_window_exceeded" if by_context else "max_tokens"
            return {"stop_reason": why, "stop_sequence": None}
        return {"stop_reason": "stop_sequence" if output.stop else "end_turn", "stop_sequence": output.stop}

    def _block(self, call: Call, part: Part) -> dict[str, Any]:
        block = opened(part)
        if part.call is not None:
            block["input"] = json.loads(part.call.arguments)
        elif part.kind == "reasoning":
            block |= {"thinking": "" if self.hides_thoughts else part.text, "signature": signature(call)}
        else:
            block["text"] = part.text
        return block


def opened(part: Part) -> dict[str, Any]:
    """Return an empty block for a part."""
    if part.call is not None:
        return {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": {}}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def signature(call: Call) -> str:
    """Return a thinking block's signature. Clients require one to send the block back; it proves nothing."""
    return f"sig_{call.id}"


class MessageWriter:
    """Writes blocks in turn: each is started, extended and stopped before the next."""

    def __init__(self, answer: MessageAnswer, call: Call):
        self._answer, self._call = answer, call
        self._deltas = DeltaStream(answer.chat)
        self._open: Part | None = None
        self._index = -1
        self._calls = False

    def open(self) -> str:
        """Return the first events. Cached tokens are not known yet; the last event has the final counts."""
        (request,) = self._answer.requests
        usage: dict[str, Any] = {"input_tokens": len(request.prompt), "cache_creation_input_tokens": 0}
        usage |= {"cache_read_input_tokens": 0, "output_tokens": 0, "service_tier": "standard"}
        message = self._answer.message(self._call, [], usage)
        return named_event({"type": "message_start", "message": message}) + PING

    def write(self, event: RequestEvent) -> str:
        return "".join(self._piece(part_of(delta)) for delta in self._deltas.push(event))

    def close(self, output: Output, more: str = "") -> str:
        delta = self._answer.ended(output, self._calls)
        ended = {
            "type": "message_delta",
            "delta": delta,
            "usage": self._answer.usage(output),
            **stats(self._call, [output]),
        }
        return self._stop() + named_event(ended) + named_event({"type": "message_stop"})

    def _piece(self, part: Part) -> str:
        opening = ""
        if self._open is None or not self._open.continues_with(part):
            opening = self._stop() + self._start(part)
        if part.call is not None:
            self._calls = True
            return opening + self._delta("input_json_delta", "partial_json", part.call.arguments)
        if part.kind == "reasoning" and self._answer.hides_thoughts:
            return opening
        return opening + self._delta(*_DELTAS[part.kind], part.text)

    def _start(self, part: Part) -> str:
        self._open = part
        self._index += 1
        return named_event({"type": "content_block_start", "index": self._index, "content_block": opened(part)})

    def _stop(self) -> str:
        if self._open is None:
            return ""
        signed = self._open.kind == "reasoning"
        self._open = None
        last = self._delta("signature_delta", "signature", signature(self._call)) if signed else ""
        return last + named_event({"type": "content_block_stop", "index": self._index})

    def _delta(self, kind: str, name: str, text: str) -> str:
        """Return a delta event, built without a dictionary because there is one for every piece."""
        delta = f'{{"type":"{kind}","{name}":{quote(text)}}}'
        head = 'event: content_block_delta\ndata: {"type":"content_block_delta","index":'
        return f'{head}{self._index},"delta":{delta}}}\n\n'


router = APIRouter()


@router.post("/v1/messages", responses=documented(MessageObject, *ERRORS, error=MessagesError, **EVENTS))
async def messages(request: Request) -> Response:
    """Return the next message of a conversation, for clients of Anthropic's API."""
    body = await body_of(request, MessagesRequest)
    service = models_of(request).named(body.model)
    places = tool_places(body)
    chat = chat_request(body)
    with named_as(FIELDS, places):
        check(chat, service.settings.limits)

    async def prepare(_: Call, loaded: Loaded) -> MessageAnswer:
        try:
            with named_as(FIELDS, places):
                return MessageAnswer(body, await prepare_chat(request, loaded, chat, body.max_tokens))
        except ContextExceeded as e:  # Anthropic's words tell clients to shorten the conversation
            message = f"prompt is too long: {e.prompt} tokens > {e.context} maximum"
            raise ApiError(400, message, "messages", e.code) from e

    ping = ServerSentEvent('{"type":"ping"}', event="ping", sep="\n")
    return await respond(request, service, 1, prepare, bool(body.stream), ping, _error_event, chat.answer_seconds)


@router.post("/v1/messages/count_tokens", responses=documented(TokenCount, *ERRORS, error=MessagesError))
async def count_tokens(request: Request) -> Response:
    """Count the prompt tokens of a conversation."""
    body = await body_of(request, CountTokensRequest)
    service = models_of(request).named(body.model)
    chat = chat_request(body)

    async def count() -> int:
        loaded = await models_of(request).loaded(service)
        prompt = in_thread(request, loaded, lambda encode: read_prompt(chat, loaded, encode, must_fit=False))
        return len(await prompt)

    with service.encoding(client_of(request)), named_as(FIELDS, tool_places(body)):
        return json_response({"input_tokens": await unless_disconnected(request, count())})


def _error_event(error: ApiError) -> bytes:
    return named_event(error.messages_body).encode()
