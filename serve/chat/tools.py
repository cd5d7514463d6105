"""Tools: what a request offers a model to call, and the calls that parsers find in its text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eagle_mlx.errors import PromptError

Tool = Mapping[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters"}}, checked by `serve/api/schema.py`."""


@dataclass(frozen=True)
class ToolOffer:
    """The tools offered to a model, and whether it must call one."""

    tools: tuple[Tool, ...] = ()
    forced: tuple[Tool, ...] = ()
    """If not empty, the model must call one of these."""
    several: bool = True
    """Whether an answer may contain several calls."""

    @property
    def strict(self) -> tuple[Tool, ...]:
        """Optional tools with strict schemas: a call of one must fit its schema."""
        return () if self.forced else tuple(tool for tool in self.tools if tool["function"].get("strict") is True)

    @classmethod
    def of(
        cls, tools: Sequence[Tool], tool_choice: str | Mapping[str, Any] | None = None, parallel: bool = True
    ) -> ToolOffer:
        """Read `tools`, `tool_choice` and `parallel_tool_calls` of a request. Raises PromptError that names the field.

        With the choice `none`, no tool is offered, so the model does not see any; with `allowed_tools`, only these.
        """
        names = tool_names(tools)
        if len(set(names)) < len(names):
            raise PromptError(f"tools: two tools have the same name; got {', '.join(names)}")
        choice, offered = tool_choice or "auto", tuple(tools)
        if choice == "none" or (choice == "auto" and not offered):
            return cls()
        if choice == "auto":
            return cls(offered, (), parallel)
        if not offered:
            raise PromptError(f"tool_choice: {choice!r} needs tools, and the request has none")
        if isinstance(choice, str):
            return cls(offered, offered, parallel)
        subset = choice.get("allowed_tools")
        chosen = [tool["function"]["name"] for tool in (subset["tools"] if subset else [choice])]
        for name in chosen:
            if name not in names:
                raise PromptError(f"tool_choice: there is no tool {name[:100]!r}; the tools are {', '.join(names)}")
        if subset:
            return cls.of([tools[names.index(name)] for name in dict.fromkeys(chosen)], subset["mode"], parallel)
        return cls(offered, (offered[names.index(chosen[0])],), False)


def without(tool: Tool, field: str) -> Tool:
    """Return a tool without one field of its function."""
    return {**tool, "function": {key: value for key, value in tool["function"].items() if key != field}}


def tool_names(tools: Sequence[Tool]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


@dataclass(frozen=True)
class ToolCall:
    """A call in an answer, or the next piece of one."""

    index: int
    """Its position among the answer's calls."""
    id: str
    """Empty in pieces after the first, and so is the name."""
    name: str
    arguments: str
    """The JSON text of an object, or a piece of it."""

    def joined(self, piece: ToolCall) -> ToolCall:
        """Return the call with one more piece of its arguments."""
        return replace(self, arguments=self.arguments + piece.arguments)


def whole_calls(pieces: Iterable[ToolCall | None]) -> list[ToolCall]:
    """Join the pieces of calls."""
    calls: list[ToolCall] = []
    for piece in filter(None, pieces):
        calls.append(piece if piece.id else calls.pop().joined(piece))
    return calls


@dataclass(frozen=True)
class CallForm:
    """How a model writes calls with JSON arguments, for grammars and prompts."""

    name: str
    """The text between the opening tag, or the call before, and the function's name."""
    arguments: str
    """The text between the name and the arguments."""
    end: str
    """The text after the arguments."""
    start: str = ""
    """The opening tag."""
    last: str = ""
    """The closing tag."""
    inner: str | None = None
    """The text between two calls in the same tags. None if tags hold one call."""
    outer: str | None = None
    """The text between two pairs of tags. None if an answer has only one pair."""

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text of calls: names, and arguments as JSON."""
        each = [f"{self.name}{name}{self.arguments}{arguments}{self.end}" for name, arguments in calls]
        if self.inner is not None:
            each = [self.inner.join(each)]
        return (self.outer or "").join(f"{self.start}{one}{self.last}" for one in each)


@dataclass(frozen=True)
class ToolCallTags:
    """The tags of a model's calls, and the notation between them."""

    start: str
    """Empty if calls have no tags (`BareCallParser`)."""
    end: str
    """Empty if a call lasts until the next one, or until the answer ends."""
    parser: str
    """The name of the notation in `NOTATIONS`."""
    form: CallForm | None = None
    """None if grammars cannot describe the calls."""
    one_by_one: bool = False
    """Whether the template writes only one call per message."""
    rewrites: bool = False
    """Whether tools and calls become text if the template ignores them."""
    variants: tuple[tuple[str, str], ...] = ()
    """Other tags of the same notation: start and end."""
    bare: tuple[str, str] | None = None
    """The beginning of a function and its end, if it has no tags around it, or models forget them."""


@dataclass(frozen=True)
class AnswerStates:
    """The states of an answer, such as content and reasoning, and the tags that lead from one to another."""

    think_start: str = ""
    think_end: str = ""
    edges: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """For each state (`content`, `reasoning`, or a state of the template's own): tags, and the states they lead to."""
    initial: str = ""
    """The state in which an answer begins, if it is not content or reasoning."""
    resume: str = ""
    """The text that follows a thought, before content or calls."""
    answer: str = ""
    """The text before content, with a grammar."""
