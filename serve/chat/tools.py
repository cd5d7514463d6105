"""Tools that a request offers, the calls of a model, and the tags and types by which parsers find and read them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from eagle_mlx.errors import PromptError
from eagle_mlx.text import held_back

Tool = Mapping[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters"}}, checked by `serve/api/schema.py`."""


NAME = r"[A-Za-z_][\w.-]{0,63}"
"""A function's name, as OpenAI limits it, and with the periods of nested names."""


@dataclass(frozen=True)
class ToolOffer:
    """The tools offered to a model, and whether it must call one."""

    tools: tuple[Tool, ...] = ()
    forced: tuple[Tool, ...] = ()  # if not empty, the model must call one of these
    several: bool = True  # whether an answer may contain several calls
    withheld: frozenset[str] = frozenset()  # the names of tools that `allowed_tools` leaves out

    @property
    def strict(self) -> tuple[Tool, ...]:
        """Optional tools with strict schemas: a call of one must fit its schema."""
        return () if self.forced else tuple(tool for tool in self.tools if tool["function"].get("strict") is True)

    @cached_property
    def functions(self) -> Mapping[str, Mapping[str, Types]]:
        """The tools' names, with the names of their parameters and the parameters' types."""
        functions = [tool["function"] for tool in self.tools]
        return {function["name"]: _parameter_types(function.get("parameters") or {}) for function in functions}

    def allows(self, name: Any) -> bool:
        """Return whether a call of this name is one. A name that the model made up is: its client answers that there is
        no such function, and the model goes on.
        """
        return name in self.functions or (name not in self.withheld and bool(re.fullmatch(NAME, name)))

    @classmethod
    def of(
        cls, tools: Sequence[Tool], tool_choice: str | Mapping[str, Any] | None = None, parallel: bool = True
    ) -> ToolOffer:
        """Read `tools`, `tool_choice` and `parallel_tool_calls` of a request. Raises PromptError that names the field.

        With the choice `none`, no tool is offered, so the model does not see any; with `allowed_tools`, only these.
        """
        names = tool_names(tools)
        if len(set(names)) < len(names):
            raise PromptError.at("tools", f"two tools have the same name; got {', '.join(names)}")
        choice, offered = tool_choice or "auto", tuple(tools)
        if choice == "none" or (choice == "auto" and not offered):
            return cls()
        if choice == "auto":
            return cls(offered, (), parallel)
        if not offered:
            raise PromptError.at("tool_choice", f"{choice!r} needs tools, and the request has none")
        if isinstance(choice, str):
            return cls(offered, offered, parallel)
        subset = choice.get("allowed_tools")
        chosen = tool_names(subset["tools"] if subset else [choice])
        if unknown := [name for name in chosen if name not in names]:
            problem = f"there is no tool {unknown[0][:100]!r}; the tools are {', '.join(names)}"
            raise PromptError.at("tool_choice", problem)
        if subset:
            allowed = cls.of([tools[names.index(name)] for name in dict.fromkeys(chosen)], subset["mode"], parallel)
            return replace(allowed, withheld=frozenset(names) - set(chosen))
        return cls(offered, (offered[names.index(chosen[0])],), False)


def without(tool: Tool, field: str) -> Tool:
    return {**tool, "function": {key: value for key, value in tool["function"].items() if key != field}}


def with_all_fields(tool: Tool) -> Tool:
    """Return a tool with a description and parameters, perhaps empty, because some templates need both."""
    function = {"description": "", "parameters": {"type": "object", "properties": {}}, **tool["function"]}
    return {**tool, "function": function}


def tool_names(tools: Sequence[Tool]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


@dataclass(frozen=True)
class ToolCall:
    """A call in an answer, or the next piece of one. Pieces after the first have neither id nor name."""

    index: int  # its position among the answer's calls
    id: str
    name: str
    arguments: str  # the JSON text of an object, or a piece of it

    def joined(self, piece: ToolCall) -> ToolCall:
        return replace(self, arguments=self.arguments + piece.arguments)


def whole_calls(pieces: Iterable[ToolCall | None]) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for piece in filter(None, pieces):
        calls.append(piece if piece.id else calls.pop().joined(piece))
    return calls


@dataclass(frozen=True)
class CallForm:
    """A model's notation of calls with JSON arguments, for grammars and prompts.

    A call is `name`, the function's name, `arguments`, its arguments, `end`. It follows the opening tag `start`, or
    another call and `inner`; None if tags hold one call. The closing tag is `last`. `outer` is the text between two
    pairs of tags; None if an answer has only one pair.
    """

    name: str
    arguments: str
    end: str
    start: str = ""
    last: str = ""
    inner: str | None = None
    outer: str | None = None

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        bodies = [f"{self.name}{name}{self.arguments}{arguments}{self.end}" for name, arguments in calls]
        if self.inner is not None:
            bodies = [self.inner.join(bodies)]
        return (self.outer or "").join(f"{self.start}{body}{self.last}" for body in bodies)


@dataclass(frozen=True)
class ToolCallTags:
    """The tags of a model's calls, and the notation between them."""

    start: str  # empty if calls have no tags (`BareCallParser`)
    end: str  # empty if a call lasts until the next one, or until the answer ends
    parser: str  # the name of the notation in `NOTATIONS`
    form: CallForm | None = None  # None if grammars cannot describe the calls
    one_by_one: bool = False  # whether the template writes only one call per message
    rewrites: bool = False  # whether tools and calls become text if the template ignores them
    variants: tuple[tuple[str, str], ...] = ()  # other tags of the same notation: start and end
    bare: tuple[str, str] | None = None
    """The beginning of a function and its end, if it has no tags around it, or models forget them."""


@dataclass(frozen=True)
class AnswerStates:
    """The states of an answer, such as content and reasoning, and the tags that lead from one to another."""

    think_start: str = ""
    think_end: str = ""
    edges: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """For each state (`content`, `reasoning`, or a state of the template's own): tags, and the states they lead to."""
    initial: str = ""  # the state in which an answer begins, if it is not content or reasoning
    resume: str = ""  # the text that follows a thought, before content or calls
    answer: str = ""  # the text before content, with a grammar


REACH = 64  # characters of white space that may precede a tag on its line


def leading_tag(text: str, tag: str, final: bool) -> int | None:
    """Return the length of a tag at the beginning, and of the white space before it: 0 if there is none.

    None if more text may complete the tag. final: no more text follows.
    """
    bare = text.lstrip()
    if bare.startswith(tag):
        return len(text) - len(bare) + len(tag)
    return None if tag.startswith(bare) and not final else 0


def begins_line(text: str, at: int, is_start: bool) -> bool:
    """Return whether only blanks precede a position on its line. is_start: whether the text itself begins a line."""
    before = text[max(0, at - REACH) : at].rstrip(" \t")
    return before.endswith("\n") or (not before and at <= REACH and is_start)


def safe_length(text: str, tags: Sequence[str]) -> int:
    """Return how many characters precede anything that may become a tag, and the line breaks that belong to it.

    Models write tags on separate lines; those line breaks are not content.
    """
    tail = text[-max(map(len, tags), default=1) :]
    if not any(first in tail for first in {"\n", *(tag[0] for tag in tags)}):  # most text needs no closer look
        return len(text)
    return len(text[: len(text) - held_back(text, tags)].rstrip("\n"))


Types = frozenset[str]  # the JSON types that a schema allows; empty if they are unknown
_DEEPEST = 16  # schemas nested deeper have no known type
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_ALIASES = {
    **{"str": "string", "text": "string", "int": "integer", "long": "integer", "float": "number", "double": "number"},
    **{"bool": "boolean", "dict": "object", "list": "array"},
}
"""Names of types that tools have although JSON Schema does not."""
_INTEGER = re.compile(r"-?\d{1,4000}(?:\.0{1,40})?")  # Python refuses to read integers of more than 4,300 digits
_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def typed_value(text: str, types: Types) -> Any:
    """Return the value that an argument's text stands for. A text of none of these types stays text.

    Integers are exact. A text is null, an object or an array only if a string is not what the schema allows for it. If
    the types are unknown, objects and arrays are read, and other texts stay text.
    """
    bare = text.strip()
    if bare in _CONSTANTS and ("null" if _CONSTANTS[bare] is None else "boolean") in types - {"string"}:
        return _CONSTANTS[bare]
    if "string" in types:
        return text
    if types & {"integer", "number"} and _INTEGER.fullmatch(bare):
        return int(bare.partition(".")[0])
    readable = types & {"number", "object", "array"} if types else {"object", "array"}
    value = _structure(bare) if readable else None
    return value if isinstance(value, float | dict | list) and _NAMES[type(value)] in readable else text


def _structure(text: str) -> Any:
    """Read JSON, or a Python literal of a list or dictionary; None if it is neither."""
    with suppress(ValueError, RecursionError):
        return DECODER.decode(text)
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return json.loads(json.dumps(ast.literal_eval(text), allow_nan=False)) if text[:1] in ("[", "{") else None
    return None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key is given twice")
    return values


DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant, object_pairs_hook=_unique)
"""Reads JSON in calls: line breaks in strings are allowed; constants such as NaN, and keys given twice, are not."""


def encoded(arguments: dict[str, Any]) -> str:
    """Return the JSON text of a call's arguments. Raises ValueError if they have none."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # half a surrogate pair has no UTF-8


def _parameter_types(parameters: Tool) -> dict[str, Types]:
    properties, seen = parameters.get("properties"), dict[str, Types]()
    items = properties.items() if isinstance(properties, Mapping) else ()
    return {name: _types(schema, parameters, seen, _DEEPEST) for name, schema in items}


def _types(schema: Any, root: Mapping[str, Any], seen: dict[str, Types], depth: int) -> Types:
    """Return the types that a schema allows. `seen` holds those of references.

    Tools made from Python types often have `$ref`, or `anyOf` for types such as `int | None`.
    """
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    ref, kind = schema.get("$ref"), schema.get("type")
    if isinstance(ref, str):
        if ref not in seen:
            seen[ref] = frozenset()  # a reference to itself
            seen[ref] = _types(_resolved(root, ref), root, seen, depth - 1)
        return seen[ref]
    if isinstance(kind, str | list):
        names = [kind] if isinstance(kind, str) else map(str, kind)
        return frozenset(_ALIASES.get(name, name) for name in names)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            options = [_types(option, root, seen, depth - 1) for option in schema[key]]
            if key == "allOf":
                return next((types for types in options if types), frozenset())
            return frozenset().union(*options) if all(options) else frozenset()
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return frozenset("null" if value is None else _NAMES[type(value)] for value in values)


def _resolved(root: Mapping[str, Any], ref: str) -> Any:
    """Return the part of a schema that `#/…` points to; None if there is none."""
    start, *steps = ref.split("/")
    node: Any = root if start == "#" else None
    for step in steps:
        node = node.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node
