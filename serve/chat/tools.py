"""What a request offers a model to call, and whether it must."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_mlx.errors import PromptError

Tool = Mapping[str, Any]
"""As OpenAI's API has it: {"type": "function", "function": {"name", "description", "parameters"}}."""

MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True)
class ToolOffer:
    """The tools that a model is told of, and whether it must call one."""

    tools: tuple[Tool, ...] = ()
    forced: tuple[Tool, ...] = ()
    """Those of which one must be called; none where the model is free."""
    several: bool = True
    """Whether one answer may hold several calls."""

    @property
    def strict(self) -> tuple[Tool, ...]:
        """Those whose calls must fit their schema though the model is free to call none."""
        return () if self.forced else tuple(tool for tool in self.tools if tool["function"].get("strict") is True)

    @classmethod
    def of(
        cls, tools: Sequence[Tool] | None, tool_choice: str | Mapping[str, Any] | None = None, parallel: bool = True
    ) -> ToolOffer:
        """Read `tools`, `tool_choice` and `parallel_tool_calls` of a request. Raises PromptError that names the field.

        With `none` no tool is offered, so that the model does not know of any.
        """
        offered = check_tools(tools or ())
        choice = tool_choice if tool_choice is not None else "auto"
        if choice == "none" or (choice == "auto" and not offered):
            return cls()
        if choice == "auto":
            return cls(offered, (), parallel)
        if not offered:
            raise PromptError(f"tool_choice: {choice!r} needs tools, and the request has none")
        if choice == "required":
            return cls(offered, offered, parallel)
        name = _chosen_name(choice)
        forced = tuple(tool for tool in offered if tool["function"]["name"] == name)
        if not forced:
            raise PromptError(
                f"tool_choice: there is no tool {str(name)[:100]!r}; the tools are {', '.join(tool_names(offered))}"
            )
        return cls(offered, forced, False)


def check_tools(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """The tools, where all of them can be used. Raises PromptError that names the place."""
    if not isinstance(tools, Sequence) or isinstance(tools, str) or len(tools) > MOST_TOOLS:
        raise PromptError(f"tools: must be a list of at most {MOST_TOOLS} tools")
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise PromptError(
                f'{where}: must be {{"type": "function", "function": {{...}}}}; nothing else is supported'
            )
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PromptError(
                f"{where}.function.name: must be 1 to 128 letters, digits, `_`, `-` and `.`; got {name!r}"
            )
        if not isinstance(function.get("description") or "", str):
            raise PromptError(f"{where}.function.description: must be text")
        if not isinstance(function.get("parameters") or {}, Mapping):
            raise PromptError(f"{where}.function.parameters: must be a JSON schema, an object")
    if len(set(tool_names(tools))) < len(tools):
        raise PromptError(f"tools: two of them have the same name; got {', '.join(tool_names(tools))}")
    return tuple(tools)


def tool_names(tools: Sequence[Tool]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def _chosen_name(choice: Any) -> Any:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if not isinstance(function, Mapping) or choice.get("type", "function") != "function" or "name" not in function:
        raise PromptError(
            'tool_choice: must be "none", "auto", "required" or {"type": "function", "function": {"name": "..."}}; '
            f"got {choice!r}"
        )
    return function["name"]
