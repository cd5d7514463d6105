"""A request of the Responses API as the one of Chat Completions that means the same."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

from ..conversation import EFFORTS, PARAGRAPH, Conversation, named_as
from ..schema import ChatRequest, validated
from .schema import (
    CallOutputItem,
    ContentPart,
    CustomCallItem,
    FunctionCallItem,
    Item,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
    TextPart,
)
from .tools import Functions, custom_arguments, flat_name

FIELDS = {
    r"response_format\.json_schema\.schema": "text.format.schema",
    r"response_format": "text.format",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"messages(\[\d+\][\w.\[\]]*)?": "input",
}
"""Fields of Chat Completions, and what they are here. Messages are not the client's own, so no item is named."""
_SEALED = "thought:"
"""Begins what stands here for an encrypted thought. It is the thought itself in base64: the client could read it."""


def input_items(body: ResponsesRequest) -> list[Item]:
    return [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def chat_request(body: ResponsesRequest, items: Sequence[Item], functions: Functions) -> ChatRequest:
    """The chat that these items make, without max_output_tokens, which is only a bound. Raises ApiError."""
    asked: dict[str, Any] = {
        "messages": _messages(body.instructions, items, len(items) - len(input_items(body))),
        "tools": functions.functions or None,
        "tool_choice": functions.choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body),
        "verbosity": body.text.verbosity if body.text is not None else None,
        **body.model_dump(include={"temperature", "top_p", "top_k"}),
        **body.extensions(),
    }
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort == "none":
        asked["chat_template_kwargs"] = {"enable_thinking": False} | (body.chat_template_kwargs or {})
    elif effort is not None:
        asked["reasoning_effort"] = EFFORTS.get(effort, effort)
    with named_as(FIELDS, functions.places):
        return validated(ChatRequest, asked)


def sealed(thought: str) -> str:
    """A thought for clients that send back only what they take for encrypted, as Codex does."""
    return _SEALED + b64encode(thought.encode()).decode()


def unsealed(text: str | None) -> str:
    """The thought; nothing where another server has sealed it."""
    if not text or not text.startswith(_SEALED):
        return ""
    try:
        return b64decode(text.removeprefix(_SEALED), validate=True).decode()
    except ValueError:
        return ""


def _messages(instructions: str | None, items: Sequence[Item], kept: int) -> list[dict[str, Any]]:
    """kept: how many items come from the previous response, and not from the request."""
    conversation = Conversation()
    if instructions:
        conversation.say("system", instructions)
    for index, item in enumerate(items):
        if isinstance(item, MessageItem):
            _say(conversation, item)
        elif isinstance(item, ReasoningItem):
            conversation.think(_thought(item))
        elif isinstance(item, CallOutputItem):
            conversation.result(item.call_id, _text(item.output), f"input[{index - kept}].call_id")
        elif isinstance(item, CustomCallItem):
            conversation.call(item.call_id, flat_name(item.name, item.namespace), custom_arguments(item.input))
        elif isinstance(item, FunctionCallItem):
            conversation.call(item.call_id, flat_name(item.name, item.namespace), item.arguments)
    return conversation.messages


def _say(conversation: Conversation, item: MessageItem) -> None:
    text = _text(item.content)
    if item.role == "assistant":
        conversation.answer(text)
    else:
        conversation.say("user" if item.role == "user" else "system", text)


def _text(content: str | Sequence[ContentPart]) -> str:
    if isinstance(content, str):
        return content
    return PARAGRAPH.join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def _thought(item: ReasoningItem) -> str:
    return "".join(part.text for part in item.content or item.summary) or unsealed(item.encrypted_content)


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    """`text.format`, which has the schema's fields beside its type."""
    form = body.text.format if body.text is not None else None
    if form is None:
        return None
    if form.type != "json_schema":
        return form.model_dump(by_alias=True, include={"type", "schema_"}, exclude_none=True)
    schema = form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": schema}
