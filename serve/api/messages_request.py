"""Requests of Anthropic's Messages API, and their translation to Chat Completions requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field

from ..chat.history import PARAGRAPH
from .conversation import EFFORTS, BareTool, ChatExtensions, Names, OwnTool, Turns, translated
from .errors import ApiError
from .limits import Limits
from .schema import BY_TYPE, Body, ChatRequest, Many, Media, T, refuse_last_media, without_data

KNOWN_TOOLS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("known_tools.yaml").read_bytes())
"""Description and parameters of the tools that have no schema in requests, by type."""


class Cached(Body):
    """What may carry a cache breakpoint; the prefix cache finds shared prefixes without them."""

    cache_control: Any = None


class TextBlock(Cached):
    type: Literal["text"]
    text: str
    citations: Any = None


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
    input: dict[str, Any] | str | None = None
    caller: Any = None


class ToolResultBlock(Cached):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[Annotated[TextBlock | Media, BY_TYPE, BeforeValidator(without_data)]] | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | Media,
    BY_TYPE,
    BeforeValidator(without_data),
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


class CountTokensRequest(ChatExtensions, Cached):
    """The conversation and everything else that goes into the prompt."""

    messages: Annotated[Many[Turn], Field(min_length=1)]
    system: str | Many[TextBlock] | None = None
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
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
    ".function.parameters": ".input_schema",
    ".function": "",
}
_BLOCKS = {
    "user": (TextBlock, ToolResultBlock, Media),
    "system": (TextBlock,),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock, Media),
}


def chat_request(body: CountTokensRequest, limits: Limits) -> ChatRequest:
    """Return the chat. It leaves out max_tokens, which is only a bound. Raises ApiError that names the field."""
    asked: dict[str, Any] = {"messages": _messages(body), **body.extensions(), **_tools(body)}
    asked.setdefault("continue_final_message", body.messages[-1].role == "assistant")
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
    return translated(asked, names_of(body), limits)


def names_of(body: CountTokensRequest) -> Names:
    return Names("messages", _FIELDS, [index for index, tool in enumerate(body.tools or ()) if not _is_hosted(tool)])


def _is_hosted(tool: ClientTool | BareTool) -> bool:
    """Return whether Anthropic runs a tool, or only its models know the schema."""
    return isinstance(tool, BareTool) and tool.type not in KNOWN_TOOLS


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    conversation = Turns()
    if text := PARAGRAPH.join(block.text for block in _blocks(body.system)):
        conversation.say("system", text)
    for index, turn in enumerate(body.messages):
        _add(conversation, turn, f"messages[{index}].content")
    if body.messages[-1].role == "user":
        refuse_last_media(body.messages[-1].content, f"messages[{len(body.messages) - 1}].content")
    return conversation.messages


def _blocks(content: str | list[T] | None) -> list[T | TextBlock]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else [*(content or [])]


def _add(conversation: Turns, turn: Turn, where: str) -> None:
    if turn.role == "assistant":
        conversation.say("assistant", "")  # its blocks may hold nothing for the prompt
    for index, block in enumerate(_blocks(turn.content)):
        if not isinstance(block, _BLOCKS[turn.role]):
            said = f"a block of type {block.type} is not allowed in a message of role {turn.role}"
            raise ApiError(400, f"{where}[{index}]: {said}", f"{where}[{index}]")
        if isinstance(block, TextBlock | Media):
            conversation.say(turn.role, _text(block))
        elif isinstance(block, ThinkingBlock):
            conversation.think(block.thinking)
        elif isinstance(block, ToolUseBlock):
            conversation.call(block.id, block.name, block.input)
        elif isinstance(block, ToolResultBlock):
            conversation.result(block.tool_use_id, _result(block), f"{where}[{index}].tool_use_id")


def _text(block: TextBlock | Media) -> str:
    return block.text if isinstance(block, TextBlock) else block.note


def _result(block: ToolResultBlock) -> str:
    text = PARAGRAPH.join(map(_text, _blocks(block.content)))
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
