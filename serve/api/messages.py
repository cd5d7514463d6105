"""Anthropic's Messages API: requests as chats, and answers as a message or as a stream of events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from sse_starlette import ServerSentEvent
from starlette.responses import Response

from eagle_mlx.request import Output

from ..chat import Delta
from .answer import Measured, named_event, stats
from .chat import finish_reason, render_chat
from .conversation import BY_TYPE, EFFORTS, PARAGRAPH, BareTool, Conversation, Extensions, Names, OwnTool, PartsAnswer
from .errors import ERRORS, EVENTS, ApiError, MessagesError, Shape, documented
from .flow import body_of, in_turn, models_of, respond, respond_encoded
from .limits import Limits
from .model import Encode, Loaded
from .schema import Body, ChatRequest, Many, T, supported, validated

KNOWN_TOOLS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("known_tools.yaml").read_bytes())
"""Description and parameters of the tools that have no schema in requests, by type."""


class Cached(Body):
    """What may carry a cache breakpoint; the prefix cache finds shared prefixes without them."""

    cache_control: Any = None


class TextBlock(Cached):
    type: Literal["text"]
    text: str
    citations: Any = None


TextOnly = Annotated[TextBlock, BeforeValidator(supported)]


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """Encrypted reasoning, which is left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Cached):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None


class ToolResultBlock(Cached):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[TextOnly] | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    BY_TYPE,
    BeforeValidator(supported),
]


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[Many[Block], Field(min_length=1)]


class ClientTool(OwnTool, Cached):
    type: Literal["custom", None] = None
    input_schema: dict[str, Any]
    # Ignored: tool input arrives in one piece.
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None


OfferedTool = Annotated[ClientTool | BareTool, BY_TYPE]


class MessagesToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1)
    """Not enforced: reasoning ends when the model ends it, or at max_tokens."""
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Extensions, Cached):
    """The conversation and everything else that goes into the prompt."""

    messages: Annotated[Many[Turn], Field(min_length=1)]
    system: str | Many[TextOnly] | None = None
    tools: Many[OfferedTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Ignored: these concern Anthropic's own servers.
    context_management: dict[str, Any] | None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    speed: Literal["standard"] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1)
    """An upper bound: the context may leave fewer."""
    stream: bool | None = None
    stop_sequences: Many[str] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None
    # Ignored as well.
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None
    container: None = None


_FIELDS = {
    r"stop\b(?! string)": "stop_sequences",
    r"response_format\.json_schema\.schema": "output_config.format.schema",
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"messages(\[\d+\][\w.\[\]]*)": "messages",
}
"""Chat Completions fields and their names here. Translated messages have other indexes, so errors name no index."""
_BLOCKS = {
    "user": (TextBlock, ToolResultBlock),
    "system": (TextBlock,),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
}


def chat_request(body: CountTokensRequest) -> ChatRequest:
    """Return the chat. It leaves out max_tokens, which is only a bound. Raises ApiError that names the field."""
    asked: dict[str, Any] = {"messages": _messages(body), **body.extensions(), **_tools(body)}
    if body.thinking is not None:
        asked.setdefault("chat_template_kwargs", {}).setdefault("enable_thinking", body.thinking.type != "disabled")
    output = body.output_config or OutputConfig()
    if output.effort is not None:
        asked["reasoning_effort"] = EFFORTS.get(output.effort, output.effort)
    if output.format is not None:
        form = {"name": "answer", "schema": output.format.schema_}
        asked["response_format"] = {"type": "json_schema", "json_schema": form}
    if isinstance(body, MessagesRequest):
        asked |= body.model_dump(include={"temperature", "top_p", "top_k"}) | {"stop": body.stop_sequences}
    with names_of(body).used():
        return validated(ChatRequest, asked)


def names_of(body: CountTokensRequest) -> Names:
    return Names(_FIELDS, [index for index, tool in enumerate(body.tools or ()) if not _is_hosted(tool)])


def _is_hosted(tool: ClientTool | BareTool) -> bool:
    """Return whether Anthropic runs a tool, or only its models know the schema."""
    return isinstance(tool, BareTool) and tool.type not in KNOWN_TOOLS


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    conversation = Conversation()
    if text := PARAGRAPH.join(block.text for block in _blocks(body.system)):
        conversation.say("system", text)
    for index, turn in enumerate(body.messages):
        _add(conversation, turn, f"messages[{index}].content")
    if body.messages[-1].role == "assistant":
        message = "messages: the last message is the assistant's; this server cannot continue a partial answer"
        raise ApiError(400, message, "messages")
    return conversation.messages


def _blocks(content: str | list[T] | None) -> list[T | TextBlock]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else [*(content or [])]


def _add(conversation: Conversation, turn: Turn, where: str) -> None:
    if turn.role == "assistant":
        conversation.say("assistant", "")  # its blocks may hold nothing for the prompt
    for index, block in enumerate(_blocks(turn.content)):
        if not isinstance(block, _BLOCKS[turn.role]):
            said = f"a block of type {block.type} is not allowed in a message of role {turn.role}"
            raise ApiError(400, f"{where}[{index}]: {said}", f"{where}[{index}]")
        if isinstance(block, TextBlock):
            conversation.say(turn.role, block.text)
        elif isinstance(block, ThinkingBlock):
            conversation.think(block.thinking)
        elif isinstance(block, ToolUseBlock):
            conversation.call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
        elif isinstance(block, ToolResultBlock):
            conversation.result(block.tool_use_id, _result(block), f"{where}[{index}].tool_use_id")


def _result(block: ToolResultBlock) -> str:
    text = PARAGRAPH.join(part.text for part in _blocks(block.content))
    return f"Error: {text}" if block.is_error else text


def _tools(body: CountTokensRequest) -> dict[str, Any]:
    """Return the tool fields of the chat. Tools that Anthropic runs are dropped if there are others."""
    given, choice = body.tools or [], body.tool_choice
    offered = [tool for tool in given if not _is_hosted(tool)]
    if given and not offered and isinstance(given[0], BareTool):
        raise given[0].refusal("Anthropic")
    asked: dict[str, Any] = {"tools": [_function(tool) for tool in offered] or None}
    if choice is None:
        return asked
    if choice.type == "tool" and choice.name is None:
        raise ApiError(400, "tool_choice.name: must name the tool", "tool_choice.name")
    named = {"type": "function", "function": {"name": choice.name}}
    asked["tool_choice"] = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
    return asked | {"parallel_tool_calls": not choice.disable_parallel_tool_use}


def _function(tool: ClientTool | BareTool) -> dict[str, Any]:
    if isinstance(tool, BareTool):
        function = {"name": tool.name, **KNOWN_TOOLS[tool.type]}
    else:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function | ({"strict": True} if tool.strict else {})}


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


class MessageObject(Measured):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | SignedThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Shape):
    input_tokens: int


_EMPTY = {"input": {}, "text": "", "thinking": "", "signature": ""}
"""The fields of blocks that events fill in."""


class MessageAnswer(PartsAnswer):
    """A chat's answer as a message, or as events that write its blocks in turn."""

    ping = ServerSentEvent('{"type":"ping"}', event="ping", sep="\n")

    def __init__(self, body: MessagesRequest, limits: Limits):
        super().__init__(chat_request(body), body.max_tokens, names_of(body), limits)
        self.body = body
        self.hides_thoughts = body.thinking is not None and body.thinking.display == "omitted"

    def error_event(self, error: ApiError) -> bytes:
        return named_event(error.messages_body).encode()

    def ended(self, output: Output) -> dict[str, Any]:
        content = [self._block(part) for part in self.parts]
        return self._message(content, self._usage(output)) | self._reason(output) | stats(self.call, [output])

    def open(self) -> str:
        """Return the first events. Cached tokens are not known yet; the last event has the final counts."""
        message = self._message([], self._usage(None))
        return named_event({"type": "message_start", "message": message}) + self.ping.encode().decode()

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
        return "" if self.hides_thoughts else self._delta("thinking_delta", "thinking", more.reasoning)

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
            return {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        if not part.reasoning:
            return {"type": "text", "text": part.content}
        thinking = "" if self.hides_thoughts else part.reasoning
        return {"type": "thinking", "thinking": thinking, "signature": self._signature}

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """Return a message that has not ended."""
        named = {"id": f"msg_{self.call.id}", "type": "message", "role": "assistant", "model": self.call.service.name}
        return {**named, "content": content, "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _usage(self, output: Output | None) -> dict[str, Any]:
        """Count tokens, before the answer begins only those of the prompt."""
        cached, thoughts = (output.cached_tokens, self.chat.thought_tokens(output)) if output else (0, 0)
        return {
            "input_tokens": len(self.requests[0].prompt) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": len(output.tokens) if output else 0,
            "output_tokens_details": {"thinking_tokens": thoughts},
            "service_tier": "standard",
        }

    def _reason(self, output: Output) -> dict[str, Any]:
        reason = finish_reason(output, any(part.tool_call for part in self.parts))
        if reason == "length" and len(output.tokens) < self.body.max_tokens and output.cut_off is None:
            why = "model_context_window_exceeded"
        else:
            otherwise = "stop_sequence" if output.stop else "end_turn"
            why = {"tool_calls": "tool_use", "length": "max_tokens"}.get(reason, otherwise)
        return {"stop_reason": why, "stop_sequence": output.stop if why == "stop_sequence" else None}


router = APIRouter()


@router.post("/v1/messages", responses=documented(MessageObject, *ERRORS, error=MessagesError, **EVENTS))
async def messages(request: Request) -> Response:
    """Return the next message of a conversation, for clients of Anthropic's API."""
    body = await body_of(request, MessagesRequest)
    service = models_of(request).named(body.model)
    answer = await in_turn(request, lambda: MessageAnswer(body, service.settings.limits))
    return await respond(request, service, answer, body, body.stream)


@router.post("/v1/messages/count_tokens", responses=documented(TokenCount, *ERRORS, error=MessagesError))
async def count_tokens(request: Request) -> Response:
    """Count the prompt tokens of a conversation."""
    body = await body_of(request, CountTokensRequest)
    chat = await in_turn(request, lambda: chat_request(body))

    def count(loaded: Loaded, encode: Encode) -> TokenCount:
        return TokenCount(input_tokens=len(render_chat(chat, loaded, encode, must_fit=False)[1]))

    with names_of(body).used():
        return await respond_encoded(request, body.model, count)
