"""What clients of the Messages API get, as types for the published schema."""

from __future__ import annotations

from typing import Any, Literal

from ..shapes import Metrics, Shape, Timings


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


class MessageOutputDetails(Shape):
    thinking_tokens: int


class MessageUsage(Shape):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageOutputDetails
    service_tier: Literal["standard"]


class MessageObject(Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageTextBlock | MessageThinkingBlock | MessageToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    timings: Timings
    metrics: Metrics


class TokenCount(Shape):
    input_tokens: int


class MessagesErrorBody(Shape):
    type: str
    message: str


class MessagesError(Shape):
    type: Literal["error"]
    error: MessagesErrorBody
