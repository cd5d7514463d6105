"""Split an answer into content, reasoning and tool calls while it is generated.

The tags of a model's vocabulary or template separate reasoning from content. `call_parser.py` finds the calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from eagle_mlx.text import held_back

from .call_parser import BareCallParser, ToolCallParser
from .template import ChatFormat
from .tools import AnswerStates, ToolCall, ToolOffer, begins_line, leading_tag, safe_length

Kind = Literal["content", "reasoning"]
_OPENING = "opening"  # the state before the first word


class ReasoningParser:
    """Separates reasoning from content in a stream of text. Text that may become a tag is held back.

    The tags are dropped, and so are the line breaks around them.
    """

    def __init__(self, tags: AnswerStates, starts_in_reasoning: bool = False, continued: bool = False):
        self._tags = tags
        self._state = "reasoning" if starts_in_reasoning else "content" if continued else tags.initial or _OPENING
        self._is_fresh = starts_in_reasoning and not continued  # whether no text has followed the last tag
        self._begins_line = True  # whether only blanks have followed the last line break or tag
        self._is_interrupted = False  # whether a call has just ended a thought, whose end tag may still follow
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
        while not self._is_interrupted or self._skip_end(final):
            tags = dict(self._tags.edges.get(self._state, ()))
            if self._is_fresh:
                self._text = self._text.lstrip("\n")
                self._is_fresh = not self._text
            if self._tags.think_start and self._state == "content":
                tags.setdefault(self._tags.think_start, "reasoning")
            match = self._next_tag(list(tags), final)
            at = len(self._text[: match[0]].rstrip("\n")) if match else safe_length(self._text, list(tags))
            text = self._text[: len(self._text) if final and not match else at]
            if text and self._state in ("content", "reasoning"):
                parts.append(("reasoning" if self.thinking else "content", text))
            if match is None:
                self._text = "" if final else self._text[at:]
                self._begins_line = begins_line(text, len(text), self._begins_line)
                return parts
            self._go(tags[match[1]], match[0] + len(match[1]))
        return parts

    def interrupt(self) -> list[tuple[Kind, str]]:
        """End a thought because a call came. Return the text that was held back."""
        is_interrupted = self._is_interrupted or (self.thinking and bool(self._tags.think_end))
        parts = self.push("", final=True)
        self._go("content", 0)
        self._is_interrupted = is_interrupted
        return parts

    def _skip_end(self, final: bool) -> bool:
        """Drop the end tag of an interrupted thought. Return whether that is done, or no such tag follows."""
        if (read := leading_tag(self._text, self._tags.think_end, final)) is None:
            return False
        if read:
            self._go("content", read)
        self._is_interrupted = False
        return True

    def _next_tag(self, tags: Sequence[str], final: bool) -> tuple[int, str] | None:
        """Return the position of the first tag that counts, and the tag; of several at one place, the longest.

        In content, a tag that opens a thought must begin a line or follow a tag. None if there is no tag, or if another
        may begin before it, or be longer.
        """
        marks = []
        for tag in tags:
            places = (match.start() for match in re.finditer(f"(?={re.escape(tag)})", self._text))
            if self._state == "content" and tag == self._tags.think_start:
                places = (at for at in places if begins_line(self._text, at, self._begins_line))
            marks += [(at, -len(tag), tag) for at in islice(places, 1)]
        at, _, tag = min(marks, default=(-1, 0, ""))
        waiting = 0 if final else held_back(self._text, tags)
        return None if not tag or (waiting and len(self._text) - waiting <= at) else (at, tag)

    def _open(self, final: bool) -> bool:
        """Leave the opening state as soon as the next state is certain."""
        start = self._tags.think_start
        read = leading_tag(self._text, start, final) if start else 0
        if read:
            self._go("reasoning", read)
        elif read == 0:
            self._state = "content"
        return read is not None

    def _go(self, state: str, read: int) -> None:
        self._state, self._text = state, self._text[read:]
        self._is_fresh = self._begins_line = True


@dataclass(frozen=True)
class Delta:
    """The next part of an answer; exactly one field is set."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None


class AnswerParser:
    """Converts text to deltas. All deltas together do not depend on how the text is cut.

    offer: the tools offered to the model; without any, nothing is parsed as a call. If an answer may not hold several
    calls, it ends after the first. continued: whether the prompt ends within an answer, not before it.
    enforced: whether a grammar enforces calls, so that they come in pieces.
    """

    def __init__(
        self,
        format: ChatFormat,
        offer: ToolOffer | None = None,
        starts_in_reasoning: bool = False,
        continued: bool = False,
        enforced: bool = False,
    ):
        offer = offer or ToolOffer()
        tags = format.calls if offer.tools else None
        calls = ToolCallParser if tags is None or tags.start else BareCallParser
        self._calls = calls(tags, offer, format.thoughts.think_end, enforced) if tags else None
        self._thoughts = ReasoningParser(format.thoughts, starts_in_reasoning, continued)
        self._several = offer.several
        self.has_ended = False  # Whether the only allowed call is complete. Text after it is dropped.

    @property
    def has_open_call(self) -> bool:
        """Whether the arguments of the last call are incomplete."""
        return self._calls is not None and self._calls.is_open

    def push(self, text: str) -> list[Delta]:
        """Return the deltas that are certain after this text."""
        return self._read(text, False, True)

    def ends_with(self, token: int, text: str) -> bool:
        """Read a token's text, and return whether the answer ends with it (`SamplingParams.stop_watcher`)."""
        self.push(text)
        return self.has_ended

    def finish(self, complete: bool = True) -> list[Delta]:
        """Return the rest. complete: whether the model ended its answer itself; if not, a call may be cut."""
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
            if not part or part[0].id:
                _add(deltas, self._thoughts.interrupt())
            deltas += [Delta(tool_call=call) for call in (part if self._several else part[:1])]
            if part and not self._several and not self.has_open_call:
                self.has_ended = True
                return deltas
        return deltas


def _add(deltas: list[Delta], parts: Iterable[tuple[Kind, str]]) -> None:
    for kind, text in parts:
        before: str = getattr(deltas[-1], kind) if deltas else ""
        if before:
            deltas.pop()
        deltas.append(Delta(content=before + text) if kind == "content" else Delta(reasoning=before + text))
