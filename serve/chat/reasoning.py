"""Thoughts in an answer, told from what is said, by the marks that a model's tokenizer knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .marks import certain, next_mark

Kind = Literal["content", "reasoning"]
_OPENING = "opening"
"""The state before the first word, where alone a thought may open: later, the mark is something that is said."""


@dataclass(frozen=True)
class ThoughtMarks:
    """How a model marks its thoughts, as states and the marks that lead from one to another."""

    think_start: str = ""
    think_end: str = ""
    edges: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """By state (`content`, `reasoning`, or one whose text is the template's own): marks, and where they lead."""
    initial: str = ""
    """The state in which an answer begins, where it is neither of the two."""


class ThoughtReader:
    """Tells the thoughts from the rest in a text that keeps coming; what may become a mark waits.

    The marks themselves are dropped, with the line breaks around them.
    """

    def __init__(self, marks: ThoughtMarks, starts_in_reasoning: bool = False):
        self._marks = marks
        self._state = "reasoning" if starts_in_reasoning else marks.initial or _OPENING
        self._fresh = starts_in_reasoning
        """Whether nothing came since the last mark."""
        self._text = ""

    @property
    def thinking(self) -> bool:
        return self._state == "reasoning"

    def push(self, text: str, final: bool = False) -> list[tuple[Kind, str]]:
        """What is certain after this text. final: no more text comes."""
        self._text += text
        parts: list[tuple[Kind, str]] = []
        if self._state == _OPENING and not self._open(final):
            return parts
        while True:
            marks = dict(self._marks.edges.get(self._state, ()))
            if self._fresh:
                self._text = self._text.lstrip("\n")
                self._fresh = not self._text
            found = next_mark(self._text, list(marks), final)
            at = len(self._text[: found[0]].rstrip("\n")) if found else certain(self._text, list(marks))
            self._emit(self._text[: len(self._text) if final and not found else at], parts)
            if found is None:
                self._text = "" if final else self._text[at:]
                return parts
            self._go(marks[found[1]], found[0] + len(found[1]))

    def interrupt(self) -> list[tuple[Kind, str]]:
        """A call came: it ends a thought. Returns what was waiting."""
        parts = self.push("", final=True)
        self._go("content", 0)
        return parts

    def _open(self, final: bool) -> bool:
        """Leave the opening, where it can be told into which state."""
        start, said = self._marks.think_start, self._text.lstrip()
        if start and said.startswith(start):
            self._go("reasoning", len(self._text) - len(said) + len(start))
        elif start and start.startswith(said) and not final:
            return False
        else:
            self._state = "content"
        return True

    def _go(self, state: str, read: int) -> None:
        self._state, self._text, self._fresh = state, self._text[read:], True

    def _emit(self, text: str, parts: list[tuple[Kind, str]]) -> None:
        if text and self._state in ("content", "reasoning"):
            parts.append(("reasoning" if self.thinking else "content", text))
