"""Translates Messages API requests to Chat Completions requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..conversation import EFFORTS, PARAGRAPH, BareTool, Conversation, Names
from ..errors import ApiError
from ..schema import ChatRequest, validated
from .schema import (
    KNOWN_TOOLS,
    Block,
    ClientTool,
    CountTokensRequest,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)

_FIELDS = {
    r"stop\b(?! string)": "stop_sequences",
    r"response_format\.json_schema\.schema": "output_config.format.schema",
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"messages(\[\d+\][\w.\[\]]*)": "messages",
}
"""Chat Completions fields and their names here. Translated messages have other indexes, so errors name no index."""
_ROLES = {"user": (TextBlock, ToolResultBlock), "system": (TextBlock,)}


def chat_request(body: CountTokensRequest) -> ChatRequest:
    """Return the chat. It leaves out max_tokens, which is only a bound. Raises ApiError that names the field."""
    asked: dict[str, Any] = {"messages": _messages(body), **body.extensions(), **_tools(body)}
    if body.thinking is not None:
        thinks = {"enable_thinking": body.thinking.type != "disabled"}
        asked["chat_template_kwargs"] = thinks | (body.chat_template_kwargs or {})
    if (output := body.output_config) is not None:
        if output.effort is not None:
            asked["reasoning_effort"] = EFFORTS.get(output.effort, output.effort)
        if output.format is not None:
            asked["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": output.format.schema_},
            }
    if isinstance(body, MessagesRequest):
        sampling = body.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True)
        asked |= sampling | {"stop": body.stop_sequences}
    with names_of(body).used():
        return validated(ChatRequest, asked)


def names_of(body: CountTokensRequest) -> Names:
    return Names(_FIELDS, [index for index, tool in enumerate(body.tools or ()) if not _is_hosted(tool)])


def _is_hosted(tool: ClientTool | BareTool) -> bool:
    """Return whether Anthropic runs a tool, or only its models know the schema."""
    return isinstance(tool, BareTool) and tool.type not in KNOWN_TOOLS


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    conversation = Conversation()
    system = [TextBlock(type="text", text=body.system)] if isinstance(body.system, str) else body.system or []
    if text := PARAGRAPH.join(block.text for block in system):
        conversation.say("system", text)
    for index, turn in enumerate(body.messages):
        _add(conversation, turn, f"messages[{index}].content")
    if body.messages[-1].role == "assistant":
        message = "messages: the last message is the assistant's; this server cannot continue a partial answer"
        raise ApiError(400, message, "messages")
    return conversation.messages


def _add(conversation: Conversation, turn: Turn, where: str) -> None:
    blocks = [TextBlock(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
    if not blocks:
        raise ApiError(400, f"{where}: must have at least one block", where)
    if turn.role == "assistant":
        _add_answer(conversation, blocks, where)
        return
    for index, block in enumerate(blocks):
        if not isinstance(block, _ROLES[turn.role]):
            raise _misplaced(block, turn.role, f"{where}[{index}]")
        if isinstance(block, TextBlock):
            conversation.say("system" if turn.role == "system" else "user", block.text)
        elif isinstance(block, ToolResultBlock):
            conversation.result(block.tool_use_id, _result(block), f"{where}[{index}].tool_use_id")


def _add_answer(conversation: Conversation, blocks: Sequence[Block], where: str) -> None:
    conversation.answer("")
    for index, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            conversation.answer(block.text)
        elif isinstance(block, ThinkingBlock):
            conversation.think(block.thinking)
        elif isinstance(block, ToolUseBlock):
            conversation.call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
        elif isinstance(block, ToolResultBlock):
            raise _misplaced(block, "assistant", f"{where}[{index}]")


def _misplaced(block: Block, role: str, where: str) -> ApiError:
    return ApiError(400, f"{where}: a block of type {block.type} is not allowed in a message of role {role}", where)


def _result(block: ToolResultBlock) -> str:
    content = block.content or ""
    text = content if isinstance(content, str) else PARAGRAPH.join(part.text for part in content)
    return f"Error: {text}" if block.is_error else text


def _tools(body: CountTokensRequest) -> dict[str, Any]:
    """Return the tool fields of the chat. Tools that Anthropic runs are dropped if there are others."""
    given, choice = body.tools or [], body.tool_choice
    offered = [tool for tool in given if not _is_hosted(tool)]
    hosted = {tool.name: (at, str(tool.type)) for at, tool in enumerate(given) if _is_hosted(tool)}
    chosen = choice.name if choice is not None and choice.type == "tool" else None
    if hosted and (not offered or chosen in hosted):
        at, kind = hosted[chosen] if chosen in hosted else next(iter(hosted.values()))
        message = f"tools[{at}].type: {kind[:60]} runs on Anthropic's servers; give tools that the client runs"
        raise ApiError(400, message, f"tools[{at}].type")
    functions = [_function(tool) for tool in offered]
    asked: dict[str, Any] = {"tools": functions} if functions else {}
    if choice is None:
        return asked
    if choice.type == "tool" and choice.name is None:
        raise ApiError(400, "tool_choice.name: must name the tool", "tool_choice.name")
    named = {"type": "function", "function": {"name": choice.name}}
    asked["tool_choice"] = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
    if choice.disable_parallel_tool_use:
        asked["parallel_tool_calls"] = False
    return asked


def _function(tool: ClientTool | BareTool) -> dict[str, Any]:
    if isinstance(tool, BareTool):
        function = {"name": tool.name, **KNOWN_TOOLS[tool.type]}
    else:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function | ({"strict": True} if tool.strict else {})}
