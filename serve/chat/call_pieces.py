"""Reads calls that a grammar enforces in pieces: no continuation of them can be text."""

from __future__ import annotations

import re
from typing import Any, Literal

import regex

from .tools import CallForm

_MARK = re.compile(r"""\\.|["'()\[\]{}]""", re.DOTALL)


class Brackets:
    """Finds where the brackets of JSON or of a Python call close, in a text that comes in parts."""

    def __init__(self) -> None:
        self._quote, self._depth = "", 0

    def read(self, text: str, start: int) -> tuple[int, bool]:
        """Return where the reading must go on, and whether the brackets closed there. A last backslash must wait."""
        at = start
        for mark in _MARK.finditer(text, start):
            at, sign = mark.end(), mark[0]
            if self._quote:
                self._quote = "" if sign == self._quote else self._quote
            elif sign in "\"'":
                self._quote = sign
            elif len(sign) == 1:
                self._depth += 1 if sign in "([{" else -1
                if self._depth == 0:
                    return at, True
        return len(text) - (at < len(text) and text.endswith("\\")), False


class CallPieces:
    """Reads the calls of one body: names, and arguments as the model writes them."""

    def __init__(self, form: CallForm, tag: str, names: str):
        """tag: the opening tag that precedes a body. names: a pattern of the functions' names, longest first."""
        lead = form.start + form.name
        header = rf"(?P<name>{names}){regex.escape(form.arguments)}(?=\{{)"
        inner = ("(?!)" if form.inner is None else regex.escape(form.inner + form.name)) + header
        self._first: Any = regex.compile(regex.escape(lead[lead.find(tag) + len(tag) :]) + header)
        self._next: Any = regex.compile(f"{regex.escape(form.end)}(?:{inner}|{regex.escape(form.last)})")
        self._state: Literal["before", "arguments", "after"] = "before"
        self._brackets = Brackets()

    @property
    def is_open(self) -> bool:
        """Whether the arguments of a call are incomplete."""
        return self._state == "arguments"

    @property
    def has_begun(self) -> bool:
        """Whether a call of a body has begun whose closing tag has not been read."""
        return self._state != "before"

    def read(self, text: str, at: int, final: bool) -> tuple[str, str, int] | None:
        """Return the name of a call if one begins, the next part of its arguments, and where the text goes on.

        None if there is no call, or if more text is needed. final: no more text follows.
        """
        name = ""
        if not self.is_open:
            match = (self._next if self.has_begun else self._first).match(text, at, partial=True)
            if match is None or match.partial:
                if not self.has_begun or (match and not final):
                    return None
                self._state = "before"
                return "", "", len(text) if match else at
            name, at = match["name"] or "", match.end()
            self._state, self._brackets = "arguments" if name else "before", Brackets()
        if not self.is_open:
            return "", "", at
        end, is_closed = self._brackets.read(text, at)
        self._state = "after" if is_closed else "arguments"
        return name, text[at:end], end
