"""Tags in a text that keeps coming: where the next one is, and how much of the text can be told before it."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_mlx.text import held_back


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
