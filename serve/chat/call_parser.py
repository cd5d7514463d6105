"""Finds the calls in a stream of text: between tags, or, for Llama and Gemma, in bare JSON or Python."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import regex

from .call_formats import NOTATIONS
from .call_markup import Call, OpenBodyError
from .tools import (
    DECODER,
    NAME,
    REACH,
    CallForm,
    ToolCall,
    ToolCallTags,
    ToolOffer,
    begins_line,
    encoded,
    leading_tag,
    safe_length,
)

_MOST_MALFORMED = 64  # failed calls after which an answer is plain text: each may cost another pass over the rest
_MOST_PARSED = 1 << 24
"""Characters to parse in an answer, about a second: a body with many end tags in its values is parsed at each."""
_LEAST_FRAGMENT = 6
"""Characters at the end of a text that was cut which are a call's beginning. Fewer are common in any text."""
Read = tuple[list[ToolCall] | None, int] | None
"""The calls of a body, and where the text goes on. Without calls, the text up to there is no call. None: read later."""


_FENCED = re.compile(r"```\w*")
_MARK = re.compile(r"""\\.|["'()\[\]{}]""", re.DOTALL)


class Brackets:
    """Finds where the brackets of JSON or of a Python call close, in a text that comes in parts."""

    def __init__(self) -> None:
        self._quote, self._depth = "", 0

    def read(self, text: str, start: int) -> tuple[int, bool]:
        """Return where to read on, and whether the brackets closed there. A last backslash must wait."""
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
    """Reads the calls of a body that a grammar enforces in pieces: no continuation of them can be text."""

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

        None if there is no call, or if more text is needed.
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


class ToolCallParser:
    """Finds calls between tags. Everything else is returned as text; only the fragment of a call cut short is dropped.

    Text before a call is returned at once. Text that may become a tag waits, and a call waits until it is complete. A
    body that does not account for all of its text, or calls a withheld function, is text. A call that a grammar
    enforces comes in pieces, also if it is cut short. Line breaks before a tag belong to the tag.
    """

    def __init__(self, tags: ToolCallTags, offer: ToolOffer, think_end: str = "", enforced: bool = False):
        """enforced: whether a grammar enforces calls, so that they are returned in pieces."""
        self._tags, self._offer = tags, offer
        self._names = f"(?:{'|'.join(map(re.escape, sorted(offer.functions, key=len, reverse=True)))})"
        self._pieces = CallPieces(tags.form, tags.start, self._names) if enforced and tags.form else None
        self._notation = NOTATIONS[tags.parser]
        self._lead: Any = regex.compile(self._notation.lead.replace("NAMES", f"(?:{self._names}|{NAME})"))
        bare = tags.bare if tags.bare and tags.bare[0] != tags.start else None
        self._bare = tuple(f"{bare[0]}{name}>" for name in offer.functions) if bare else ()
        self._inner = {tags.start} if tags.bare and not bare else set(self._bare)
        """Opening tags that are the function's own, and so belong to the body."""
        self._ends: dict[str, tuple[str, ...]] = dict.fromkeys(self._bare, (bare[1],) if bare else ())
        """For each opening tag, the tags that end its call."""
        for start, end in ((tags.start, tags.end or tags.start), *tags.variants):
            self._ends[start] = (*self._ends.get(start, ()), end)
        self._think_end = "" if think_end in self._ends[tags.start] else think_end
        self._text = ""
        self._is_inside = False  # Whether a call's body is open. It starts at `_body` in the text.
        self._body = 0
        self._begin = ""  # the opening tag of the open call
        self._searched = 0
        self._malformed, self._parsed = 0, 0
        self._count = 0
        self._ids = set[str]()  # of the answer's calls
        self._ready: Read = None  # what was read while it is not certain that a thought only mentions it
        self._begins_line = True
        self._follows_bare = False

    @property
    def is_open(self) -> bool:
        return self._pieces is not None and self._pieces.is_open

    def feed(self, text: str) -> None:
        self._text += text

    def next(self, thinking: bool, final: bool = False, complete: bool = True) -> str | list[ToolCall] | None:
        """Return the next piece of text or the next calls, or None if the rest must wait.

        thinking: whether the text so far is in a thought. A thought that goes on after a call only mentions it. final:
        no more text follows. complete: if final, whether the model ended its answer itself.
        """
        if self._is_inside:
            return self._inside(thinking, final, complete)
        return self._outside(thinking, final, complete) if self._text else None

    def _outside(self, thinking: bool, final: bool, complete: bool) -> str | list[ToolCall] | None:
        if self._follows_bare:  # an end tag may follow a function without an opening tag
            if (read := leading_tag(self._text, self._tags.end, final)) is None:
                return None
            self._text, self._follows_bare = self._text[read:], False
        tags = () if self._is_tired else [tag for tag in self._ends if not thinking or tag not in self._bare]
        if (opening := self._opening(tags)) is None:
            return self._take_certain(safe_length(self._text, tags), final, complete)
        start, self._begin = opening
        taken = len(self._text[:start].rstrip("\n"))
        before = self._take(taken)
        self._searched = start - taken + len(self._begin)
        self._body = start - taken if self._begin in self._inner else self._searched
        self._is_inside = True
        return before or self._inside(thinking, final, complete)

    def _take_certain(self, certain: int, final: bool, complete: bool) -> str | None:
        """Return the text that is no part of a call. certain: what is before anything that may become one."""
        if final and not complete and len(_FENCED.sub("", self._text[certain:]).strip("\n")) >= _LEAST_FRAGMENT:
            self._text = self._text[:certain]
        return self._take(len(self._text) if final else certain)

    def _opening(self, tags: Sequence[str]) -> tuple[int, str] | None:
        """Return the first opening tag and its position. Without the tags around it, a function begins a line."""
        if not tags:
            return None
        for match in re.finditer("|".join(map(re.escape, tags)), self._text):
            if match[0] not in self._bare or begins_line(self._text, match.start(), self._begins_line):
                return match.start(), match[0]
        return None

    def _inside(self, thinking: bool, final: bool, complete: bool) -> str | list[ToolCall] | None:
        if self._pieces is not None and (self._pieces.has_begun or not thinking):
            had_begun = self._pieces.has_begun
            if piece := self._next_piece(self._pieces, final):
                return [piece]
            if had_begun:
                return None if self._is_inside else self.next(thinking, final, complete)
        self._ready = self._ready or self._read_body(thinking, final, complete)
        if self._ready is None:
            if final:  # a call that was cut short
                self._text, self._is_inside = "", False
            return None
        calls, end = self._ready
        certain = self._is_certain(end, final) if calls is not None and thinking and self._think_end else True
        if certain is None:
            return None
        self._ready = None
        if calls is None or not certain:
            self._malformed += 1
            return self._take(end)
        self._count += len(calls)
        self._follows_bare = self._begin in self._bare
        self._drop(end)
        return list(map(self._with_own_id, calls))

    def _next_piece(self, pieces: CallPieces, final: bool) -> ToolCall | None:
        if (read := pieces.read(self._text, self._body, final)) is None:
            return None
        name, arguments, end = read
        self._drop(end)
        self._is_inside, self._body = pieces.has_begun, 0
        self._count += bool(name)
        return ToolCall(self._count - 1, self._new_id() if name else "", name, arguments) if arguments else None

    def _read_body(self, thinking: bool, final: bool, complete: bool) -> Read:
        """Read the open body. None if more text is needed, or, if final, if the body was cut short."""
        if not self._lead.match(self._text, pos=self._body, partial=True):
            return None, max(self._body, self._searched)
        thought_end = self._thought_end(thinking)
        if (read := self._at_end_tags(thought_end)) is not None:
            return read
        if thought_end >= 0:
            return None, thought_end
        if self._is_tired:
            return None, self._body
        if not final:
            return None
        return self._at_the_end() if complete else self._complete_part()

    def _thought_end(self, thinking: bool) -> int:
        return self._text.find(self._think_end, self._body) if thinking and self._think_end else -1

    def _at_end_tags(self, thought_end: int) -> Read:
        """Parse the body at each end tag, until it is not open any more. None if it is always open."""
        tails, is_inner = self._notation.tails, self._begin in self._inner
        pattern = re.compile("|".join(map(re.escape, self._ends[self._begin])))
        for match in pattern.finditer(self._text, self._searched):
            if 0 <= thought_end < match.start() or self._is_tired:
                return None
            self._searched = match.end()
            stop = match.end() if is_inner else match.start()
            last = self._text[max(self._body, stop - REACH) : stop].rstrip()
            if last and tails and not last.endswith(tails):
                continue
            if (read := self._parse(stop, match.end() if self._tags.end else match.start())) is not None:
                return read
        self._searched = max(self._searched, len(self._text) - max(map(len, self._ends[self._begin])) + 1)
        return None

    def _at_the_end(self) -> tuple[list[ToolCall] | None, int]:
        """Parse the last body of an answer, whose end tag, or whose last value's end, may be missing."""
        attempts = [(len(self._text), len(self._text), False)]
        for tag in self._ends[self._begin] if self._tags.end else ():
            if (at := self._text.rfind(tag, self._body)) >= 0:
                attempts.append((at + len(tag) if self._begin in self._inner else at, at + len(tag), True))
        for stop, end, final in attempts:
            calls, end = self._parse(stop, end, final) or (None, 0)
            if calls is not None:
                return calls, end
        ends = [at for tag in self._ends[self._begin] if (at := self._text.find(tag, self._body)) >= 0]
        return None, min(ends, default=len(self._text))

    def _complete_part(self) -> Read:
        """Return the complete calls of a body that was cut short, if they can be told apart."""
        notation = self._notation
        places = [(self._text.rfind(tail, self._body), tail) for tail in notation.tails if notation.has_section]
        stop = max((at + len(tail) for at, tail in places if at >= 0), default=0)
        read = self._parse(stop, len(self._text)) if stop else None
        return read if read and read[0] is not None else None

    def _parse(self, stop: int, end: int, final: bool = False) -> Read:
        """Parse the body up to a position. Return None if it is open there. end: where the text goes on after it."""
        self._parsed += stop - self._body
        try:
            calls, length = self._notation.parse(self._text[self._body : stop], self._offer, final)
            made = [self._call(call, self._count + index) for index, call in enumerate(calls)]
            return made, end if self._tags.end else self._body + length
        except OpenBodyError:
            return None
        except Exception:  # parsers raise any exception
            return None, end

    def _is_certain(self, end: int, final: bool) -> bool | None:
        """Return whether calls in a thought are more than a mention; None while that is uncertain."""
        thought_end = self._text.find(self._think_end, end)
        if thought_end < 0:
            return True if final else None
        rest = self._text[end:thought_end].strip()
        return not rest or rest.endswith(self._ends[self._begin])

    @property
    def _is_tired(self) -> bool:
        return self._malformed >= _MOST_MALFORMED or self._parsed > _MOST_PARSED

    def _take(self, count: int) -> str | None:
        taken, begins_line = self._text[:count], self._begins_line
        self._drop(count)
        self._begins_line = taken.endswith("\n") if taken else begins_line
        return taken or None

    def _drop(self, end: int) -> None:
        self._text, self._is_inside = self._text[end:], False
        self._begins_line = True

    def _call(self, call: Call, index: int) -> ToolCall:
        name, arguments = call["name"], call["arguments"]
        if isinstance(arguments, str):
            arguments = DECODER.decode(arguments)
        if not self._offer.allows(name) or not isinstance(arguments, dict | None):
            raise ValueError("the function may not be called")
        return ToolCall(index, call.get("id") or self._new_id(), name, encoded(arguments or {}))

    def _with_own_id(self, call: ToolCall) -> ToolCall:
        """Return the call with another id if the answer has this one already: clients tell calls apart by their ids."""
        own = replace(call, id=self._new_id()) if call.id in self._ids else call
        self._ids.add(own.id)
        return own

    def _new_id(self) -> str:
        if self._tags.parser == "mistral":  # its templates only accept ids of nine letters and digits
            return secrets.token_hex(5)[:9]
        return f"call_{secrets.token_hex(12)}"


_S = r"\s{0,9}"
_LINE = r"(?:\A|(?<=\n))[ \t;,]{0,9}"
_FENCE = rf"(?:{_LINE}(?P<fence>```)\w{{0,12}}[ \t]{{0,9}}\n|(?:{_LINE})?(?P<fence><)\|python_(?:tag|start)\|>){_S}"
"""A tag, unlike a fence, may follow text on its line."""
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

    def __init__(self, tags: ToolCallTags, offer: ToolOffer, think_end: str = "", enforced: bool = False):
        super().__init__(tags, offer, think_end, enforced)
        name = self._names
        listed = rf"(?:\[{_S})?{_JSON}{name}\"|\[{_S}{name}\("
        self._unfenced = rf"{_FENCE}(?P<body>{listed}|{name}\()|{_LINE}(?P<body>{listed})"
        self._fenced = rf"(?:{_FENCE}|{_LINE})(?P<body>{listed}|{name}\()"
        self._fence = ""  # the beginning of the fence of the last call, if it is still open
        self._brackets = Brackets()

    def _outside(self, thinking: bool, final: bool, complete: bool) -> str | list[ToolCall] | None:
        match = self._next_match()
        if match is None or match.partial:
            certain = len(self._text[: match.start() if match else None].rstrip("\n"))
            return self._take_certain(certain, final, complete)
        if match.groupdict().get("close"):
            self._drop(match.end())
            self._begins_line, self._fence = False, ""
            return self.next(thinking, final, complete)
        if before := self._text[: match.start()].rstrip("\n"):
            return self._take(len(before))
        self._body = self._searched = match.start("body")
        self._is_inside = True
        self._fence, self._brackets = match["fence"] or self._fence, Brackets()
        return self._inside(thinking, final, complete)

    def _next_match(self) -> Any:
        if self._is_tired:
            return None
        pattern = rf"\A{_S}(?P<close>{_CLOSERS[self._fence]})|{self._fenced}" if self._fence else self._unfenced
        return regex.search(pattern if self._begins_line else pattern.replace(r"\A|", ""), self._text, partial=True)

    def _read_body(self, thinking: bool, final: bool, complete: bool) -> Read:
        self._searched, is_closed = self._brackets.read(self._text, self._searched)
        end, thought_end = self._searched, self._thought_end(thinking)
        if not is_closed:
            return (None, self._body + 1) if thought_end >= 0 or (final and complete) else None
        calls, _ = (self._parse(end, end) or (None, 0)) if not 0 <= thought_end < end else (None, 0)
        return (calls, end) if calls else (None, self._body + 1)

    def _take(self, count: int) -> str | None:
        taken = super()._take(count)
        if taken:
            self._fence = ""
        return taken
