"""Tools of OpenAI's Responses API as functions of Chat Completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic_core import from_json

from ..chat import ToolCall
from .conversation import BareTool, Names, OwnTool
from .schema import BY_TYPE, Body, Many


class FunctionTool(OwnTool):
    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    output_schema: dict[str, Any] | None = None


class CustomTool(OwnTool):
    """A tool with free text as its input; the model sees a function with that text as its only argument."""

    type: Literal["custom"]
    format: dict[str, Any] | None = None


FlatTool = FunctionTool | CustomTool


class NamespaceTool(Body):
    """Tools under a common name; Codex offers the tools of MCP servers this way."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Many[Annotated[FlatTool, BY_TYPE]]


ResponsesTool = Annotated[FunctionTool | CustomTool | NamespaceTool | BareTool, BY_TYPE]


class ChosenTool(Body):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None

    @property
    def function(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": flat_name(self.name, self.namespace)}}


class AllowedChoices(Body):
    """The tools that may be called. Those that OpenAI runs are ignored."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Many[Annotated[ChosenTool | BareTool, BY_TYPE]]


def chosen(choice: str | ChosenTool | AllowedChoices | None) -> str | dict[str, Any] | None:
    """Return `tool_choice` for Chat Completions."""
    if isinstance(choice, ChosenTool):
        return choice.function
    if not isinstance(choice, AllowedChoices):
        return choice
    tools = [tool.function for tool in choice.tools if isinstance(tool, ChosenTool)]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}


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

    def __init__(self, tools: Sequence[ResponsesTool] = ()):
        """Leave out tools that OpenAI runs. Raises ApiError if that leaves none."""
        self.functions: list[dict[str, Any]] = []
        self.calls: dict[str, dict[str, Any]] = {}
        """For each function, the item of a call of its tool, without the input."""
        self.names = Names("input", _FIELDS, [])
        for at, tool in enumerate(tools):
            if isinstance(tool, NamespaceTool):
                for inner in tool.tools:
                    self._add(at, inner, tool.name)
            elif not isinstance(tool, BareTool):
                self._add(at, tool, None)
        if tools and isinstance(hosted := tools[0], BareTool) and not self.functions:
            raise hosted.refusal("OpenAI")

    def _add(self, place: int, tool: FlatTool, namespace: str | None) -> None:
        name = flat_name(tool.name, namespace)
        parameters = tool.parameters if isinstance(tool, FunctionTool) else _TEXT
        function: dict[str, Any] = {"name": name, "description": _description(tool), "parameters": parameters}
        if isinstance(tool, FunctionTool) and tool.strict:
            function["strict"] = True
        self.functions.append({"type": "function", "function": function})
        self.names.tools.append(place)
        self.calls[name] = {"type": _CALLS[tool.type], "name": tool.name}
        if namespace is not None:
            self.calls[name]["namespace"] = namespace

    def takes_text(self, call: ToolCall) -> bool:
        """Return whether a call's input is text, which is not the JSON that the model writes."""
        return bool(self.calls.get(call.name, {}).get("type") == _CALLS["custom"])

    def called(self, call: ToolCall) -> dict[str, Any]:
        """Return the item of a call, without its id and status."""
        item = {"call_id": call.id, **self.calls.get(call.name, {"type": "function_call", "name": call.name})}
        if self.takes_text(call):
            return item | {"input": _text_of(call.arguments)}
        return item | {"arguments": call.arguments}


def flat_name(name: str, namespace: str | None) -> str:
    """Return a function's name that includes the tool's namespace."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") or name.startswith("__") else f"{namespace}__{name}"


def _text_of(arguments: str) -> str:
    """Return the text of a call of such a function, perhaps cut off, or all of `arguments` if a model wrote others."""
    try:
        values = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:  # half a surrogate pair
        return arguments
    text = values.get("input") if values else ""
    return text if isinstance(text, str) else arguments


def _description(tool: FlatTool) -> str | None:
    """Return a tool's description, with the grammar of its input, which is not enforced here."""
    form: dict[str, Any] = (tool.format or {}) if isinstance(tool, CustomTool) else {}
    if not isinstance(definition := form.get("definition"), str):
        return tool.description
    grammar = f"The input follows this grammar ({form.get('syntax', 'lark')}):\n{definition}"
    return "\n\n".join(filter(None, (tool.description, grammar)))


_FIELDS = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    ".function": "",
}
