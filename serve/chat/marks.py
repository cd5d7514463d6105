"""Marks in a text that keeps coming: where the next one is, and how much of the text can be told before it."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_mlx.text import held_back


def next_mark(text: str, marks: Sequence[str], final: bool = False) -> tuple[int, str] | None:
    """The place of the first mark, and which; None as long as there is none, or another may begin before it."""
    found = min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=None)
    waiting = 0 if final else held_back(text, marks)
    return None if found is None or len(text) - waiting < found[0] else found


def certain(text: str, marks: Sequence[str]) -> int:
    """How many characters come before all that may become a mark, and before the line breaks that would belong to it.

    Models write marks on lines of their own; those line breaks are no part of what is said.
    """
    if not marks:
        return len(text)
    return len(text[: len(text) - held_back(text, marks)].rstrip("\n"))
