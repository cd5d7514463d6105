"""Anthropic's Messages API: answers as a message or as a stream of events, and token counts."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from sse_starlette import ServerSentEvent
from starlette.responses import Response

from eagle_mlx.request import Output

from ..chat import Delta
from .answer import Measured, named_event, stats
from .chat import EncodedChat, render_chat
from .conversation import PartsAnswer, PendingParts, arguments_of
from .encoding import Encoder
from .errors import ERRORS, EVENTS, ApiError, MessagesError, Shape, documented
from .flow import respond, respond_encoded
from .messages_request import (
    CountTokensRequest,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    chat_request,
    names_of,
)
from .model import Loaded
from .received import models_of, receive
from .schema import ChatRequest
from .service import Call


class MessageUsage(Shape):
    """Anthropic's counts; `input_tokens` excludes cached tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[Literal["thinking_tokens"], int]
    service_tier: Literal["standard"]


class SignedThinkingBlock(ThinkingBlock):
    signature: str


class MadeToolUseBlock(ToolUseBlock):
    input: dict[str, Any]


class MessageObject(Measured):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | SignedThinkingBlock | MadeToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Shape):
    input_tokens: int


_EMPTY = {"input": {}, "text": "", "thinking": "", "signature": ""}
"""The fields of blocks that events fill in."""


class PendingMessage(PendingParts):
    def __init__(self, call: Call, body: MessagesRequest, chat: ChatRequest):
        super().__init__(call, chat, body.max_tokens, names_of(body))
        self.body = body

    def answer(self, chat: EncodedChat) -> MessageAnswer:
        return MessageAnswer(self, chat)

    def keep_alive(self) -> ServerSentEvent:
        return ServerSentEvent('{"type":"ping"}', event="ping", sep="\n")

    def fail(self, error: ApiError) -> bytes:
        return named_event(error.messages_body).encode()


class MessageAnswer(PartsAnswer):
    """A chat's answer as a message, or as events that write its blocks in turn."""

    def __init__(self, pending: PendingMessage, chat: EncodedChat):
        super().__init__(pending, chat)
        thinking, self._most = pending.body.thinking, pending.body.max_tokens
        self._hides_thoughts = thinking is not None and thinking.display == "omitted"

    def ended(self, output: Output) -> dict[str, Any]:
        content = [self._block(part) for part in self.parts]
        return self._message(content, self._usage(output)) | self._reason(output) | stats(self.call, [output])

    def open(self) -> str:
        """Return the first events. Cached tokens are not known yet; the last event has the final counts."""
        message = self._message([], self._usage(None))
        return named_event({"type": "message_start", "message": message}) + self.pending.keep_alive().encode().decode()

    def close(self, index: int, output: Output, more: dict[str, Any]) -> str:
        delta = {"type": "message_delta", "delta": self._reason(output), "usage": self._usage(output), **more}
        return self.end("completed") + named_event(delta) + named_event({"type": "message_stop"})

    def start(self) -> str:
        block = {key: _EMPTY.get(key, value) for key, value in self._block(self.parts[-1]).items()}
        return named_event({"type": "content_block_start", "index": len(self.parts) - 1, "content_block": block})

    def extend(self, more: Delta) -> str:
        if more.tool_call is not None:
            return self._delta("input_json_delta", "partial_json", more.tool_call.arguments)
        if not more.reasoning:
            return self._delta("text_delta", "text", more.content)
        return "" if self._hides_thoughts else self._delta("thinking_delta", "thinking", more.reasoning)

    def end(self, status: str) -> str:
        if not self.parts:
            return ""
        signed = self._delta("signature_delta", "signature", self._signature) if self.parts[-1].reasoning else ""
        return signed + named_event({"type": "content_block_stop", "index": len(self.parts) - 1})

    def _delta(self, kind: str, name: str, text: str) -> str:
        delta = {"type": kind, name: text}
        return named_event({"type": "content_block_delta", "index": len(self.parts) - 1, "delta": delta})

    @property
    def _signature(self) -> str:
        """A thinking block's signature. Clients require one to send the block back; it proves nothing."""
        return f"sig_{self.call.id}"

    def _block(self, part: Delta) -> dict[str, Any]:
        if (call := part.tool_call) is not None:
            return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments_of(call)}
        if not part.reasoning:
            return {"type": "text", "text": part.content}
        thinking = "" if self._hides_thoughts else part.reasoning
        return {"type": "thinking", "thinking": thinking, "signature": self._signature}

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """Return a message that has not ended."""
        named = {"id": f"msg_{self.call.id}", "type": "message", "role": "assistant", "model": self.call.service.name}
        return {**named, "content": content, "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _usage(self, output: Output | None) -> dict[str, Any]:
        """Count tokens, before the answer begins only those of the prompt."""
        cached, thoughts = (output.cached_tokens, self._deltas.thought_tokens(output)) if output else (0, 0)
        return {
            "input_tokens": len(self.requests[0].prompt) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": len(output.tokens) if output else 0,
            "output_tokens_details": {"thinking_tokens": thoughts},
            "service_tier": "standard",
        }

    def _reason(self, output: Output) -> dict[str, Any]:
        reason = self._deltas.finish_reason(output)
        if reason == "length" and len(output.tokens) < self._most and output.cut_off is None:
            why = "model_context_window_exceeded"
        else:
            otherwise = "stop_sequence" if output.stop else "end_turn"
            why = {"tool_calls": "tool_use", "length": "max_tokens"}.get(reason, otherwise)
        return {"stop_reason": why, "stop_sequence": output.stop if why == "stop_sequence" else None}


router = APIRouter()


@router.post("/v1/messages", responses=documented(MessageObject, *ERRORS, error=MessagesError, **EVENTS))
async def messages(request: Request) -> Response:
    """Return the next message of a conversation, for clients of Anthropic's API."""
    received = await receive(request, MessagesRequest)
    body = received.body
    service = models_of(request).named(body.model)
    chat = await received.in_turn(lambda: chat_request(body, service.settings.limits))
    return await respond(received, service, lambda call: PendingMessage(call, body, chat))


@router.post("/v1/messages/count_tokens", responses=documented(TokenCount, *ERRORS, error=MessagesError))
async def count_tokens(request: Request) -> Response:
    """Count the prompt tokens of a conversation."""
    received = await receive(request, CountTokensRequest)
    body = received.body
    chat = await received.in_turn(lambda: chat_request(body, models_of(request).settings.limits))

    def count(loaded: Loaded, encode: Encoder) -> TokenCount:
        return TokenCount(input_tokens=len(render_chat(chat, loaded, encode, must_fit=False)[1]))

    with names_of(body).used():
        return await respond_encoded(received, count)
