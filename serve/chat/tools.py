"""Tools: what a request offers a model to call, and the calls in the text that it writes, by mlx-lm's parsers."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_mlx.errors import PromptError
from eagle_mlx.text import held_back

Tool = Mapping[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters"}}, as `serve/api/schema.py` checks it."""


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

    @property
    def for_template(self) -> list[Tool]:
        """The tools without `strict`, which is for the server."""
        return [without(tool, "strict") for tool in self.tools]

    @classmethod
    def of(
        cls, tools: Sequence[Tool], tool_choice: str | Mapping[str, Any] | None = None, parallel: bool = True
    ) -> ToolOffer:
        """Read `tools`, `tool_choice` and `parallel_tool_calls` of a request. Raises PromptError that names the field.

        With `none` no tool is offered, so that the model does not know of any.
        """
        names = tool_names(tools)
        if len(set(names)) < len(names):
            raise PromptError(f"tools: two of them have the same name; got {', '.join(names)}")
        choice, offered = tool_choice or "auto", tuple(tools)
        if choice == "none" or (choice == "auto" and not offered):
            return cls()
        if choice == "auto":
            return cls(offered, (), parallel)
        if not offered:
            raise PromptError(f"tool_choice: {choice!r} needs tools, and the request has none")
        if isinstance(choice, str):
            return cls(offered, offered, parallel)
        name = choice["function"]["name"]
        if name not in names:
            raise PromptError(f"tool_choice: there is no tool {name[:100]!r}; the tools are {', '.join(names)}")
        return cls(offered, (offered[names.index(name)],), False)


def without(tool: Tool, field: str) -> Tool:
    """Return a tool whose function lacks a field."""
    return {**tool, "function": {key: value for key, value in tool["function"].items() if key != field}}


def tool_names(tools: Sequence[Tool]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


ToolParser = Callable[[str, Any], Any]
"""The text between a call's tags and the tools -> {"name", "arguments"}, or several; raises where it is no call."""

_ALPHANUMERIC = string.ascii_letters + string.digits
_MOST_MALFORMED = 64
"""Failed calls after which an answer is plain text: each costs another look at what follows."""

_MOST_FUNCTION_GEMMA = 1 << 15
"""Characters of a call: its parser copies what is left for each argument. Its model's context has 32,768 tokens."""
_MOST_UNCLOSED = 16
"""Tags between two ends, of which a call has one; a text that is an argument may hold some more."""
_GLM = (("<arg_key>", "</arg_value>"),)
_TAGS: dict[str, Sequence[tuple[str, str]]] = {
    "glm47": _GLM,
    "laguna": _GLM,
    "longcat": (("<longcat_arg_key>", "</longcat_arg_value>"),),
    "kimi_k2": (("<|tool_call_begin|>", "<|tool_call_end|>"),),
    "kimi_k3": tuple((f"<|open|>{name}", f"<|close|>{name}<|sep|>") for name in ("call", "argument", "json")),
    "minimax_m2": (("<invoke name=", "</invoke>"), ("<parameter name=", "</parameter>")),
    "muse_spark": (("<atem:invoke", "</atem:invoke>"), ("<atem:parameter", "</atem:parameter>")),
    "qwen3_coder": (("<function=", "</function>"), ("<parameter=", "</parameter>")),
}
"""By mlx-lm's parser: tags that begin a part of a call, and the text that ends it."""
_LONG_SPACE = re.compile(r"\s{1024}")
"""Kimi K2's parser tries each way to divide white space in front of a name."""
_GEMMA4_QUOTE = '<|"|>'
_GEMMA4_PART = re.compile(r'<\|"\|>|[{}]|call:[\w-]+\{')


@dataclass(frozen=True)
class ToolCall:
    """One complete call in an answer."""

    index: int
    """Its place among the calls of the answer."""
    id: str
    name: str
    arguments: str
    """The JSON text of an object."""


@dataclass(frozen=True)
class ToolCallTags:
    """How a model tags its calls."""

    start: str
    end: str
    """Empty where a call lasts until the answer ends."""
    parse: ToolParser
    parser: str
    """The parser's name in mlx-lm."""


class ToolCallParser:
    """Finds the calls in a text that keeps coming; all that is no call comes out as text, with nothing lost.

    Text before a call passes at once; what may become a call's tag waits, and so does a call until it is complete. A
    call that cannot be parsed, or is of a function that was not offered, is text. Line breaks before a tag belong
    to it.
    """

    def __init__(self, tags: ToolCallTags, tools: Sequence[Tool], think_end: str = ""):
        self._tags, self._think_end = tags, think_end
        self._tools = [_for_parsers(tool) for tool in tools]
        self._names = frozenset(tool_names(tools))
        self._text = ""
        self._head = 0
        """Where the body of the open call begins in the text; 0 outside of calls."""
        self._searched = 0
        self._malformed = 0
        self._count = 0

    def feed(self, text: str) -> None:
        self._text += text

    def next(self, thinking: bool, final: bool = False, complete: bool = True) -> str | list[ToolCall] | None:
        """The next piece of text, or the next calls; None where all that is left must wait.

        thinking: whether the text before is a thought; the end of the thought then ends what looked like a call.
        final: no more text comes. complete: then, whether the model ended its answer itself.
        """
        if self._head:
            return self._inside(thinking, final, complete)
        if not self._text:
            return None
        return self._outside(thinking, final, complete)

    def _outside(self, thinking: bool, final: bool, complete: bool) -> str | list[ToolCall] | None:
        tags = (self._tags.start,) if self._malformed < _MOST_MALFORMED else ()
        at = self._text.find(self._tags.start) if tags else -1
        if at < 0:
            return self._take(len(self._text) if final else safe_length(self._text, tags))
        before = self._take(len(self._text[:at].rstrip("\n")))
        self._head = self._searched = self._text.index(self._tags.start) + len(self._tags.start)
        return before or self._inside(thinking, final, complete)

    def _inside(self, thinking: bool, final: bool, complete: bool) -> str | list[ToolCall] | None:
        end = self._tags.end or self._tags.start
        at = self._text.find(end, self._searched)
        thought_end = self._text.find(self._think_end, self._head) if thinking and self._think_end else -1
        if thought_end >= 0 and (at < 0 or thought_end < at):
            return self._give_up()
        if at < 0 and not final:
            self._searched = max(self._head, len(self._text) - len(end) + 1)
            return None
        closed = at >= 0
        calls = self._parse(self._text[self._head : at if closed else None]) if closed or complete else []
        if calls:
            self._take(at + len(self._tags.end) if closed else len(self._text))
            return calls
        if not self._tags.end and closed and self._malformed < _MOST_MALFORMED:
            self._malformed += 1  # the tag may stand in an argument
            self._searched = at + len(end)
            return self._inside(thinking, final, complete)
        return self._give_up()

    def _give_up(self) -> str | None:
        """What looked like a call was none: its tag is text, and what follows is looked at anew."""
        self._malformed += 1
        return self._take(self._head)

    def _take(self, count: int) -> str | None:
        taken, self._text, self._head = self._text[:count], self._text[count:], 0
        return taken or None

    def _parse(self, body: str) -> list[ToolCall]:
        try:
            if not _is_cheap(self._tags.parser, body):
                return []
            found = {"name": body.strip()} if self._is_bare(body) else self._tags.parse(body, self._tools)
            each = found if isinstance(found, list) else [found]
            calls = [self._call(call, self._count + index) for index, call in enumerate(each)]
        except Exception:  # mlx-lm's parsers raise whatever the text makes them raise
            return []
        self._count += len(calls)
        return calls

    def _is_bare(self, body: str) -> bool:
        """Whether a call is a name and no more, which mlx-lm's parser of this format does not read."""
        return self._tags.parser == "longcat" and body.strip() in self._names

    def _call(self, call: Any, index: int) -> ToolCall:
        """One of the parser's calls. Raises where it is not one of a function that was offered."""
        name, arguments = call["name"], call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if name not in self._names or not isinstance(arguments, dict | None):
            raise ValueError("not a call of a function that was offered")
        own = call.get("id")
        return ToolCall(index, own if isinstance(own, str) and own else self._new_id(), name, _json(arguments or {}))

    def _new_id(self) -> str:
        if self._tags.parser == "mistral":  # its templates take ids of nine letters and digits, and no others
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def _is_cheap(parser: str, body: str) -> bool:
    """Whether mlx-lm's parser reads the body of a call in about linear time, as far as is known.

    Most parsers search to the end for each tag that lacks its own end: 32 KB of `call:f{` took 19 s. A client can make
    the model write that. What is refused here is no call that they could read.
    """
    if parser == "function_gemma":
        unclosed = body.count("call:", body.rfind("}") + 1)
        return unclosed <= _MOST_MALFORMED and len(body) <= _MOST_FUNCTION_GEMMA
    if parser == "gemma4":
        return _gemma4_closes(body)
    if parser == "kimi_k2" and _LONG_SPACE.search(body):
        return False
    return all(part.count(start) <= _MOST_UNCLOSED for start, end in _TAGS.get(parser, ()) for part in body.split(end))


def _gemma4_closes(body: str) -> bool:
    """Whether each call of a body has its end: braces are balanced, and those in `<|"|>` strings do not count."""
    depth, quoted = 0, False
    for found in _GEMMA4_PART.finditer(body):
        part = found[0]
        if depth == 0:
            depth = int(part.startswith("call:"))
        elif part == _GEMMA4_QUOTE:
            quoted = not quoted
        elif not quoted:
            depth += -1 if part == "}" else 1
    return depth == 0


def _for_parsers(tool: Tool) -> dict[str, Any]:
    """A tool with all the keys that mlx-lm's parsers look for."""
    function = tool["function"]
    parameters = dict(function.get("parameters") or {})
    return {"type": "function", "function": {**function, "parameters": {"properties": {}, **parameters}}}


def _json(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which UTF-8 cannot hold
        return json.dumps(arguments, allow_nan=False)
    return text


def safe_length(text: str, tags: Sequence[str]) -> int:
    """How many characters come before all that may become a tag, and before the line breaks that would belong to it.

    Models write tags on lines of their own; those line breaks are no content.
    """
    if not tags:
        return len(text)
    return len(text[: len(text) - held_back(text, tags)].rstrip("\n"))
