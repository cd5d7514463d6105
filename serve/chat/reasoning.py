"""Reasoning in an answer, told from its content by the tags that a model's tokenizer knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from eagle_mlx.text import held_back

Kind = Literal["content", "reasoning"]
_OPENING = "opening"
"""The state before the first word, where alone a thought may open: later, the tag is content."""


@dataclass(frozen=True)
class ReasoningTags:
    """How a model tags its thoughts, as states and the tags that lead from one to another."""

    think_start: str = ""
    think_end: str = ""
    edges: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """By state (`content`, `reasoning`, or one whose text is the template's own): tags, and where they lead."""
    initial: str = ""
    """The state in which an answer begins, where it is neither of the two."""


class ReasoningParser:
    """Tells the thoughts from the rest in a text that keeps coming; what may become a tag waits.

    The tags themselves are dropped, with the line breaks around them.
    """

    def __init__(self, tags: ReasoningTags, starts_in_reasoning: bool = False):
        self._tags = tags
        self._state = "reasoning" if starts_in_reasoning else tags.initial or _OPENING
        self._fresh = starts_in_reasoning
        """Whether nothing came since the last tag."""
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
            tags = dict(self._tags.edges.get(self._state, ()))
            if self._fresh:
                self._text = self._text.lstrip("\n")
                self._fresh = not self._text
            found = next_tag(self._text, list(tags), final)
            at = len(self._text[: found[0]].rstrip("\n")) if found else safe_length(self._text, list(tags))
            self._emit(self._text[: len(self._text) if final and not found else at], parts)
            if found is None:
                self._text = "" if final else self._text[at:]
                return parts
            self._go(tags[found[1]], found[0] + len(found[1]))

    def interrupt(self) -> list[tuple[Kind, str]]:
        """A call came: it ends a thought. Returns what was waiting."""
        parts = self.push("", final=True)
        self._go("content", 0)
        return parts

    def _open(self, final: bool) -> bool:
        """Leave the opening, where it can be told into which state."""
        start, said = self._tags.think_start, self._text.lstrip()
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


def next_tag(text: str, tags: Sequence[str], final: bool = False) -> tuple[int, str] | None:
    """The place of the first tag, and which; None as long as there is none, or another may begin before it."""
    found = min(((at, tag) for tag in tags if (at := text.find(tag)) >= 0), default=None)
    waiting = 0 if final else held_back(text, tags)
    return None if found is None or len(text) - waiting < found[0] else found


def safe_length(text: str, tags: Sequence[str]) -> int:
    """How many characters come before all that may become a tag, and before the line breaks that would belong to it.

    Models write tags on lines of their own; those line breaks are no content.
    """
    if not tags:
        return len(text)
    return len(text[: len(text) - held_back(text, tags)].rstrip("\n"))
