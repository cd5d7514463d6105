"""Tools: what a request offers a model to call, and the calls that parsers find in its text."""

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

from .parameter_types import with_types

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

    @property
    def for_template(self) -> list[Tool]:
        """The tools without `strict`, which only the server uses."""
        return [without(tool, "strict") for tool in self.tools]

    @classmethod
    def of(
        cls, tools: Sequence[Tool], tool_choice: str | Mapping[str, Any] | None = None, parallel: bool = True
    ) -> ToolOffer:
        """Read `tools`, `tool_choice` and `parallel_tool_calls` of a request. Raises PromptError that names the field.

        With the choice `none`, no tool is offered, so the model does not see any.
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
        name = choice["function"]["name"]
        if name not in names:
            raise PromptError(f"tool_choice: there is no tool {name[:100]!r}; the tools are {', '.join(names)}")
        return cls(offered, (offered[names.index(name)],), False)


def without(tool: Tool, field: str) -> Tool:
    """Return a tool without one field of its function."""
    return {**tool, "function": {key: value for key, value in tool["function"].items() if key != field}}


def tool_names(tools: Sequence[Tool]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


ToolParser = Callable[[str, Any], Any]
"""Maps the text between a call's tags, and the tools, to {"name", "arguments"} or a list. Raises if there is none."""

_ALPHANUMERIC = string.ascii_letters + string.digits
_MOST_MALFORMED = 64
"""Failed calls after which an answer is plain text: each failure costs another search of the rest."""

_MOST_FUNCTION_GEMMA = 1 << 15
"""Characters of a call. The parser copies the rest for each argument. The model's context has 32,768 tokens."""
_MOST_UNCLOSED = 16
"""Opening tags between two end tags. A call has one; an argument's text may hold some more."""
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
"""For each of mlx-lm's parsers: tags that begin a part of a call, and the text that ends it."""
_LONG_SPACE = re.compile(r"\s{1024}")
"""Kimi K2's parser tries every way to split white space before a name."""
_GEMMA4_QUOTE = '<|"|>'
_GEMMA4_PART = re.compile(r'<\|"\|>|[{}]|call:[\w-]+\{')


@dataclass(frozen=True)
class ToolCall:
    """A complete call in an answer."""

    index: int
    """Its position among the answer's calls."""
    id: str
    name: str
    arguments: str
    """The JSON text of an object."""


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
    """The tags of a model's calls."""

    start: str
    """Empty if calls have no tags (`BareCallParser`)."""
    end: str
    """Empty if a call lasts until the answer ends."""
    parse: ToolParser
    parser: str
    """The name of the parser."""
    form: CallForm | None = None
    """None if grammars cannot describe the calls."""
    one_by_one: bool = False
    """Whether the template writes only one call per message."""
    rewrites: bool = False
    """Whether tools and calls become text if the template ignores them."""


class ToolCallParser:
    """Finds the calls in a stream of text. Everything else is returned as text; nothing is lost.

    Text before a call is returned at once. Text that may become a tag waits, and a call waits until it is complete. A
    call that cannot be parsed, or calls an unknown function, is text. Line breaks before a tag belong to the tag.
    """

    def __init__(self, tags: ToolCallTags, tools: Sequence[Tool], think_end: str = ""):
        self._tags, self._think_end = tags, think_end
        self._tools = [_for_parser(tags.parser, tool) for tool in tools]
        self._names = frozenset(tool_names(tools))
        self._text = ""
        self._head = 0
        """The start of the open call's body in the text; 0 outside of calls."""
        self._searched = 0
        self._malformed = 0
        self._count = 0

    def feed(self, text: str) -> None:
        self._text += text

    def next(self, thinking: bool, final: bool = False, complete: bool = True) -> str | list[ToolCall] | None:
        """Return the next piece of text or the next calls, or None if the rest must wait.

        thinking: whether the text so far is in a thought; the end of the thought then also ends an unfinished call.
        final: no more text follows. complete: if final, whether the model ended its answer itself.
        """
        if self._head:
            return self._inside(thinking, final, complete)
        if not self._text:
            return None
        return self._outside(thinking, final, complete)

    def _outside(self, thinking: bool, final: bool, complete: bool) -> str | list[ToolCall] | None:
        tags = () if self._is_tired else (self._tags.start,)
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
        if not self._tags.end and closed and not self._is_tired:
            self._malformed += 1  # the tag may be part of an argument
            self._searched = at + len(end)
            return self._inside(thinking, final, complete)
        return self._give_up()

    @property
    def _is_tired(self) -> bool:
        """Whether so many calls failed that the rest is text."""
        return self._malformed >= _MOST_MALFORMED

    def _give_up(self) -> str | None:
        """Treat the tag of a failed call as text, and search again after it."""
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
        except Exception:  # parsers raise any exception
            return []
        self._count += len(calls)
        return calls

    def _is_bare(self, body: str) -> bool:
        """Return whether a call is only a name. mlx-lm's parser of this format cannot read that."""
        return self._tags.parser == "longcat" and body.strip() in self._names

    def _call(self, call: Any, index: int) -> ToolCall:
        name, arguments = call["name"], call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if name not in self._names or not isinstance(arguments, dict | None):
            raise ValueError("the function was not offered")
        own = call.get("id")
        return ToolCall(index, own if isinstance(own, str) and own else self._new_id(), name, _json(arguments or {}))

    def _new_id(self) -> str:
        if self._tags.parser == "mistral":  # its templates only accept ids of nine letters and digits
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def _is_cheap(parser: str, body: str) -> bool:
    """Return whether mlx-lm's parser reads a call's body in roughly linear time.

    Most parsers search to the end for each tag without an end tag: 32 KB of `call:f{` took 19 s, and a client can make
    the model write that. Bodies that fail this check are not valid calls.
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
    """Return whether every call of a body ends. Braces must balance; those in `<|"|>` strings do not count."""
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


def _for_parser(parser: str, tool: Tool) -> dict[str, Any]:
    """Return a tool with all keys that mlx-lm's parser needs."""
    function = tool["function"]
    parameters = with_types(function.get("parameters") or {}, null_is_read=parser == "qwen3_coder")
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _json(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair has no UTF-8
        return json.dumps(arguments, allow_nan=False)
    return text


def safe_length(text: str, tags: Sequence[str]) -> int:
    """Return how many characters precede anything that may become a tag, and the line breaks that belong to it.

    Models write tags on separate lines; those line breaks are not content.
    """
    if not tags:
        return len(text)
    return len(text[: len(text) - held_back(text, tags)].rstrip("\n"))
