"""Split an answer into content, reasoning and tool calls while it is generated.

The tags that a model's tokenizer knows separate reasoning from content. Llama and Gemma write calls without tags, as
JSON or Python, perhaps in a fence.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import regex
from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.text import IncrementalText, held_back

from .tools import Tool, ToolCall, ToolCallParser, ToolCallTags, safe_length

if TYPE_CHECKING:
    from .template import ChatFormat  # it imports this module's tags

Kind = Literal["content", "reasoning"]
_OPENING = "opening"
"""The state before the first word. A thought can open only here; later, its tag is content."""


@dataclass(frozen=True)
class ReasoningTags:
    """A model's reasoning tags, as a state machine: each tag leads from one state to another."""

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


class ReasoningParser:
    """Separates reasoning from content in a stream of text. Text that may become a tag is held back.

    The tags are dropped, and so are the line breaks around them.
    """

    def __init__(self, tags: ReasoningTags, starts_in_reasoning: bool = False):
        self._tags = tags
        self._state = "reasoning" if starts_in_reasoning else tags.initial or _OPENING
        self._fresh = starts_in_reasoning
        """Whether no text has followed the last tag."""
        self._text = ""

    @property
    def thinking(self) -> bool:
        return self._state == "reasoning"

    def push(self, text: str, final: bool = False) -> list[tuple[Kind, str]]:
        """Return the parts that are certain after this text. final: no more text follows."""
        self._text += text
        parts: list[tuple[Kind, str]] = []
        if self._state == _OPENING and not self._open(final):
            return parts
        while True:
            tags = dict(self._tags.edges.get(self._state, ()))
            if self._fresh:
                self._text = self._text.lstrip("\n")
                self._fresh = not self._text
            found = next_tag(self._text, list(tags), final)
            at = len(self._text[: found[0]].rstrip("\n")) if found else safe_length(self._text, list(tags))
            text = self._text[: len(self._text) if final and not found else at]
            if text and self._state in ("content", "reasoning"):
                parts.append(("reasoning" if self.thinking else "content", text))
            if found is None:
                self._text = "" if final else self._text[at:]
                return parts
            self._go(tags[found[1]], found[0] + len(found[1]))

    def interrupt(self) -> list[tuple[Kind, str]]:
        """End a thought because a call came. Return the text that was held back."""
        parts = self.push("", final=True)
        self._go("content", 0)
        return parts

    def _open(self, final: bool) -> bool:
        """Leave the opening state as soon as the next state is certain."""
        start, text = self._tags.think_start, self._text.lstrip()
        if start and text.startswith(start):
            self._go("reasoning", len(self._text) - len(text) + len(start))
        elif start and start.startswith(text) and not final:
            return False
        else:
            self._state = "content"
        return True

    def _go(self, state: str, read: int) -> None:
        self._state, self._text, self._fresh = state, self._text[read:], True


def next_tag(text: str, tags: Sequence[str], final: bool = False) -> tuple[int, str] | None:
    """Return the position of the first tag, and the tag. None if there is none, or if another may begin before it."""
    found = min(((at, tag) for tag in tags if (at := text.find(tag)) >= 0), default=None)
    waiting = 0 if final else held_back(text, tags)
    return None if found is None or len(text) - waiting < found[0] else found


_MARK = re.compile(r"""\\.|["'()\[\]{}]""", re.DOTALL)
_S = r"\s{0,9}"
_LINE = r"(?:\A|(?<=\n))[ \t;,]{0,9}"
_FENCE = rf"(?:(?P<fence>```)\w{{0,12}}[ \t]{{0,9}}\n|(?P<fence><)\|python_(?:tag|start)\|>){_S}"
_JSON = (
    rf'\{{{_S}(?:"type"{_S}:{_S}"function"{_S},{_S})?"(?:name|function)"{_S}:{_S}'
    rf'(?:\{{{_S}"name"{_S}:{_S})?"'
)
"""A call's beginning, up to the function's name."""
_CLOSERS = {"```": "```", "<": r"<\|(?:python_end|eom_id)\|>"}


class BareCallParser(ToolCallParser):
    """Finds calls that begin a line with an offered function's name in JSON or Python, and end with their brackets.

    Fences and Python tags around calls are dropped, and so are semicolons between calls.
    """

    def __init__(self, tags: ToolCallTags, tools: Sequence[Tool], think_end: str = ""):
        super().__init__(tags, tools, think_end)
        name = f"(?:{'|'.join(map(regex.escape, sorted(self._names, key=len, reverse=True)))})"
        listed = rf"(?:\[{_S})?{_JSON}{name}\"|\[{_S}{name}\("
        self._outer = rf"{_LINE}(?:{_FENCE}(?P<body>{listed}|{name}\()|(?P<body>{listed}))"
        self._inner = rf"{_LINE}(?:{_FENCE})?(?P<body>{listed}|{name}\()"
        self._begins_line = True
        self._fence = ""
        """The beginning of the fence of the last call, if it is still open."""
        self._quote, self._depth = "", 0

    def _outside(self, thinking: bool, final: bool, complete: bool) -> str | list[ToolCall] | None:
        found = self._find()
        if found is None or found.partial:
            at = len(self._text) if final else len(self._text[: found.start() if found else None].rstrip("\n"))
            return self._take(at)
        if found.groupdict().get("close"):
            self._text, self._begins_line, self._fence = self._text[found.end() :], False, ""
            return self.next(thinking, final, complete)
        if before := self._text[: found.start()].rstrip("\n"):
            return self._take(len(before))
        self._head = self._searched = found.start("body")
        self._fence, self._quote, self._depth = found["fence"] or self._fence, "", 0
        return self._inside(thinking, final, complete)

    def _find(self) -> Any:
        if self._is_tired:
            return None
        pattern = rf"\A{_S}(?P<close>{_CLOSERS[self._fence]})|{self._inner}" if self._fence else self._outer
        at = 0 if self._begins_line else min(1, len(self._text))
        return regex.search(pattern, self._text, pos=at, partial=True)

    def _inside(self, thinking: bool, final: bool, complete: bool) -> str | list[ToolCall] | None:
        end = self._end()
        thought_end = self._text.find(self._think_end, self._head) if thinking and self._think_end else -1
        if end < 0 <= thought_end or 0 <= thought_end < end or (end < 0 and final):
            return self._give_up()
        if end < 0:
            return None
        calls = self._parse(self._text[self._head : end])
        if not calls:
            return self._give_up()
        fence = self._fence
        self._take(end)
        self._begins_line, self._fence = True, fence
        return calls

    def _end(self) -> int:
        """Return where the open call's brackets are closed; -1 if they are not yet."""
        at = self._searched
        for mark in _MARK.finditer(self._text, at):
            at, sign = mark.end(), mark[0]
            if self._quote:
                self._quote = "" if sign == self._quote else self._quote
            elif sign in "\"'":
                self._quote = sign
            elif len(sign) == 1:
                self._depth += 1 if sign in "([{" else -1
                if self._depth == 0:
                    return at
        self._searched = len(self._text) - (at < len(self._text) and self._text.endswith("\\"))
        return -1

    def _give_up(self) -> str | None:
        self._malformed += 1
        return self._take(self._head + 1)

    def _take(self, count: int) -> str | None:
        taken = super()._take(count)
        if taken:
            self._begins_line, self._fence = taken.endswith("\n"), ""
        return taken


def parse_bare_call(body: str, tools: Any) -> list[dict[str, Any]]:
    """Parse a call, or a list of calls, in JSON or Python."""
    try:
        found = json.loads(body)
    except ValueError:
        tree = ast.parse(body, mode="eval").body
        return [_from_python(each) for each in (tree.elts if isinstance(tree, ast.List) else [tree])]
    return [_from_json(each) for each in (found if isinstance(found, list) else [found])]


def _from_json(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(inner := call.get("function"), dict):
        call = inner
    arguments = call["parameters"] if "parameters" in call else call["arguments"]
    return {"name": call.get("name") or call["function"], "arguments": arguments}


_LITERALS = {"true": True, "false": False, "null": None}


class _Literals(ast.NodeTransformer):
    """Reads JSON's names of constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_LITERALS[node.id]) if node.id in _LITERALS else node


def _from_python(call: ast.expr) -> dict[str, Any]:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("not a call with named arguments")
    values = {each.arg: ast.literal_eval(_Literals().visit(each.value)) for each in call.keywords}
    if None in values:
        raise ValueError("`**` in a call")
    return {"name": ast.unparse(call.func), "arguments": values}


@dataclass(frozen=True)
class Delta:
    """The next part of an answer; exactly one field is set."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None


class AnswerParser:
    """Converts text to deltas. All deltas together do not depend on how the text is cut.

    tools: the tools offered to the model; without any, nothing is parsed as a call. several: whether an answer may hold
    several calls; if not, it ends after the first.
    """

    def __init__(
        self, format: ChatFormat, tools: Sequence[Tool] = (), starts_in_reasoning: bool = False, several: bool = True
    ):
        tags = format.calls if tools else None
        calls = ToolCallParser if tags is None or tags.start else BareCallParser
        self._calls = calls(tags, tools, format.thoughts.think_end) if tags else None
        self._thoughts = ReasoningParser(format.thoughts, starts_in_reasoning)
        self._several = several
        self.has_ended = False
        """Whether the only allowed call is complete. Text after it is dropped."""

    def push(self, text: str) -> list[Delta]:
        """Return the deltas that are certain after this text."""
        return self._read(text, False, True)

    def finish(self, complete: bool = True) -> list[Delta]:
        """Return the rest. complete: whether the model ended its answer itself; if not, an open call is text."""
        deltas = self._read("", True, complete)
        _add(deltas, self._thoughts.push("", final=True))
        return deltas

    def _read(self, text: str, final: bool, complete: bool) -> list[Delta]:
        deltas: list[Delta] = []
        if self.has_ended:
            return deltas
        if self._calls is None:
            _add(deltas, self._thoughts.push(text))
            return deltas
        self._calls.feed(text)
        while (part := self._calls.next(self._thoughts.thinking, final, complete)) is not None:
            if isinstance(part, str):
                _add(deltas, self._thoughts.push(part))
                continue
            _add(deltas, self._thoughts.interrupt())
            if not self._several:
                self.has_ended = True
                return [*deltas, Delta(tool_call=part[0])]
            deltas += [Delta(tool_call=call) for call in part]
        return deltas


class FirstCall:
    """Stops a request as soon as its answer holds one complete call (`SamplingParams.stop_watcher`)."""

    def __init__(self, tokenizer: TokenizerWrapper, parser: AnswerParser):
        """parser: must have been made with `several` false."""
        self._text, self._parser = IncrementalText(tokenizer), parser

    def __call__(self, token: int) -> bool:
        certain, _ = self._text.add([token])
        self._parser.push(certain)
        return self._parser.has_ended


def _add(deltas: list[Delta], parts: Iterable[tuple[Kind, str]]) -> None:
    for kind, text in parts:
        before: str = getattr(deltas[-1], kind) if deltas else ""
        if before:
            deltas.pop()
        deltas.append(Delta(content=before + text) if kind == "content" else Delta(reasoning=before + text))
