"""The tools of a response, as the functions that a model is told of, and the calls that come back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...chat import ToolCall
from ..errors import ApiError
from .schema import ChosenTool, CustomTool, FunctionTool, NamespaceTool, OpenAITool, OwnTool, ResponsesRequest

_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The parameters of a function that stands for a tool whose input is a text."""


@dataclass(frozen=True)
class Origin:
    """What a function was in the request."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


@dataclass
class Functions:
    """The functions that a model is told of."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Of each, where in `tools` it was."""
    origins: dict[str, Origin] = field(default_factory=dict)

    @classmethod
    def of(cls, body: ResponsesRequest) -> Functions:
        """Those of a request. Tools that OpenAI runs are left out where there are others.

        Raises ApiError where they are all that there is.
        """
        found, hosted = cls(), [(at, tool) for at, tool in enumerate(body.tools or ()) if isinstance(tool, OpenAITool)]
        for at, tool in enumerate(body.tools or ()):
            if isinstance(tool, NamespaceTool):
                for inner in tool.tools:
                    found._add(at, inner, tool.name)
            elif not isinstance(tool, OpenAITool):
                found._add(at, tool, None)
        if hosted and not found.functions:
            at, tool = hosted[0]
            said = f"tools[{at}].type: {tool.type[:60]} is run by OpenAI's servers; this one offers tools of clients"
            raise ApiError(400, said, f"tools[{at}].type")
        return found

    def _add(self, place: int, tool: OwnTool, namespace: str | None) -> None:
        name = flat_name(tool.name, namespace)
        parameters = tool.parameters if isinstance(tool, FunctionTool) else _TEXT
        function: dict[str, Any] = {"name": name, "description": _description(tool), "parameters": parameters}
        if isinstance(tool, FunctionTool) and tool.strict:
            function["strict"] = True
        self.functions.append({"type": "function", "function": function})
        self.places.append(place)
        self.origins[name] = Origin(tool.type, tool.name, namespace)

    def choice(self, chosen: str | ChosenTool | None) -> str | dict[str, Any] | None:
        """`tool_choice`, as Chat Completions has it."""
        if not isinstance(chosen, ChosenTool):
            return chosen
        return {"type": "function", "function": {"name": flat_name(chosen.name, chosen.namespace)}}

    def called(self, call: ToolCall) -> dict[str, Any]:
        """The item of a call, without what says which item it is."""
        origin = self.origins.get(call.name, Origin("function", call.name))
        named = {"call_id": call.id, "name": origin.name}
        if origin.namespace is not None:
            named["namespace"] = origin.namespace
        if origin.kind == "function":
            return {"type": "function_call", **named, "arguments": call.arguments}
        return {"type": "custom_tool_call", **named, "input": _text_of(call.arguments)}


def flat_name(name: str, namespace: str | None) -> str:
    """The name of a function, which has no namespace of its own."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") or name.startswith("__") else f"{namespace}__{name}"


def custom_arguments(text: str) -> str:
    """The arguments of a function that stands for a tool whose input is a text."""
    return json.dumps({"input": text}, ensure_ascii=False)


def _text_of(arguments: str) -> str:
    """What `custom_arguments` was made of; all of it where a model that was free wrote something else."""
    found = json.loads(arguments).get("input")
    return found if isinstance(found, str) else arguments


def _description(tool: OwnTool) -> str | None:
    """With the grammar that an input is to follow, which no model here is held to."""
    form: dict[str, Any] = (tool.format or {}) if isinstance(tool, CustomTool) else {}
    if not isinstance(definition := form.get("definition"), str):
        return tool.description
    grammar = f"The input follows this grammar ({form.get('syntax', 'lark')}):\n{definition}"
    return "\n\n".join(filter(None, (tool.description, grammar)))


def echoed(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """The tools as they were sent, but for the details of those that are not run here."""
    return [tool.model_dump(by_alias=True, exclude_unset=True) for tool in tools or ()]
