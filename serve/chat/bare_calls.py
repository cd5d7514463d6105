"""Calls without tags of their own, as Llama and Gemma write them: JSON or Python, perhaps in a fence."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

import regex

from .tools import Tool, ToolCall, ToolCallParser, ToolCallTags

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
