"""Translates Responses API requests and tools to Chat Completions requests."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

from ...chat import ToolCall
from ..conversation import EFFORTS, PARAGRAPH, BareTool, Conversation, Names
from ..errors import ApiError
from ..schema import ChatRequest, validated
from . import schema

_CALLS = {"function": "function_call", "custom": "custom_tool_call"}
_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The parameters of a function that replaces a tool with text input."""


class Functions:
    """The functions that a model sees."""

    def __init__(self, tools: Sequence[schema.ResponsesTool] = ()):
        """Leave out tools that OpenAI runs. Raises ApiError if that leaves none."""
        self.functions: list[dict[str, Any]] = []
        self.calls: dict[str, dict[str, Any]] = {}
        """For each function, the item of a call of its tool, without the input."""
        self.names = Names(_FIELDS, [])
        for at, tool in enumerate(tools):
            if isinstance(tool, schema.NamespaceTool):
                for inner in tool.tools:
                    self._add(at, inner, tool.name)
            elif not isinstance(tool, BareTool):
                self._add(at, tool, None)
        if tools and isinstance(hosted := tools[0], BareTool) and not self.functions:
            message = f"tools[0].type: {hosted.type[:60]} runs on OpenAI's servers; give tools that the client runs"
            raise ApiError(400, message, "tools[0].type")

    def _add(self, place: int, tool: schema.FunctionTool | schema.CustomTool, namespace: str | None) -> None:
        name = flat_name(tool.name, namespace)
        parameters = tool.parameters if isinstance(tool, schema.FunctionTool) else _TEXT
        function: dict[str, Any] = {"name": name, "description": _description(tool), "parameters": parameters}
        if isinstance(tool, schema.FunctionTool) and tool.strict:
            function["strict"] = True
        self.functions.append({"type": "function", "function": function})
        self.names.tools.append(place)
        self.calls[name] = {"type": _CALLS[tool.type], "name": tool.name}
        if namespace is not None:
            self.calls[name]["namespace"] = namespace

    def called(self, call: ToolCall) -> dict[str, Any]:
        """Return the item of a call, without its id and status."""
        item = {"call_id": call.id, **self.calls.get(call.name, {"type": "function_call", "name": call.name})}
        if item["type"] == "function_call":
            return item | {"arguments": call.arguments}
        return item | {"input": _text_of(call.arguments)}


def flat_name(name: str, namespace: str | None) -> str:
    """Return a function's name that includes the tool's namespace."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") or name.startswith("__") else f"{namespace}__{name}"


def _text_of(arguments: str) -> str:
    """Return the text of a call of such a function, or all of `arguments` if a model without a grammar wrote others."""
    found = json.loads(arguments).get("input")
    return found if isinstance(found, str) else arguments


def _description(tool: schema.FunctionTool | schema.CustomTool) -> str | None:
    """Return a tool's description, with the grammar of its input, which is not enforced here."""
    form: dict[str, Any] = (tool.format or {}) if isinstance(tool, schema.CustomTool) else {}
    if not isinstance(definition := form.get("definition"), str):
        return tool.description
    grammar = f"The input follows this grammar ({form.get('syntax', 'lark')}):\n{definition}"
    return "\n\n".join(filter(None, (tool.description, grammar)))


_FIELDS = {
    r"response_format\.json_schema\.schema": "text.format.schema",
    r"response_format": "text.format",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"messages(\[\d+\][\w.\[\]]*)?": "input",
}
"""Chat Completions fields and their names here. Translated messages have other indexes, so errors name no index."""
_SEALED = "thought:"
"""Prefix of `encrypted_content`, which holds the reasoning in plain base64: the client may read it."""


def input_items(body: schema.ResponsesRequest) -> list[schema.Item]:
    return [schema.MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def chat_request(body: schema.ResponsesRequest, items: Sequence[schema.Item], functions: Functions) -> ChatRequest:
    """Return the chat of these items. It leaves out max_output_tokens, which is only a bound. Raises ApiError."""
    choice: Any = body.tool_choice
    if isinstance(choice, schema.ChosenTool):
        choice = {"type": "function", "function": {"name": flat_name(choice.name, choice.namespace)}}
    asked: dict[str, Any] = {
        "messages": _messages(body.instructions, items, len(items) - len(input_items(body))),
        "tools": functions.functions or None,
        "tool_choice": choice,
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
    with functions.names.used():
        return validated(ChatRequest, asked)


def sealed(thought: str) -> str:
    """Encode reasoning for clients that send back only encrypted content, such as Codex."""
    return _SEALED + b64encode(thought.encode()).decode()


def _unsealed(text: str | None) -> str:
    """Decode reasoning; empty if another server encrypted it."""
    if not text or not text.startswith(_SEALED):
        return ""
    try:
        return b64decode(text.removeprefix(_SEALED), validate=True).decode()
    except ValueError:
        return ""


def _messages(instructions: str | None, items: Sequence[schema.Item], kept: int) -> list[dict[str, Any]]:
    """Return the messages of a chat. kept: how many items come from the previous response."""
    conversation = Conversation()
    if instructions:
        conversation.say("system", instructions)
    for index, item in enumerate(items):
        if isinstance(item, schema.MessageItem):
            role = "system" if item.role == "developer" else item.role
            conversation.say(role, _text(item.content))
        elif isinstance(item, schema.ReasoningItem):
            thought = "".join(part.text for part in item.content or item.summary)
            conversation.think(thought or _unsealed(item.encrypted_content))
        elif isinstance(item, schema.CallOutputItem):
            conversation.result(item.call_id, _text(item.output), f"input[{index - kept}].call_id")
        elif isinstance(item, schema.CustomCallItem):
            arguments = json.dumps({"input": item.input}, ensure_ascii=False)
            conversation.call(item.call_id, flat_name(item.name, item.namespace), arguments)
        elif isinstance(item, schema.FunctionCallItem):
            conversation.call(item.call_id, flat_name(item.name, item.namespace), item.arguments)
    return conversation.messages


def _text(content: str | Sequence[schema.ContentPart]) -> str:
    if isinstance(content, str):
        return content
    return PARAGRAPH.join(part.text if isinstance(part, schema.TextPart) else part.refusal for part in content)


def _response_format(body: schema.ResponsesRequest) -> dict[str, Any] | None:
    """Return `text.format` for Chat Completions, which nests the schema's fields."""
    form = body.text.format if body.text is not None else None
    if form is None:
        return None
    if form.type != "json_schema":
        return form.model_dump(by_alias=True, include={"type", "schema_"}, exclude_none=True)
    schema = form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": schema}
