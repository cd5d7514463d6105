"""Text in a terminal, with accepted draft tokens in another color."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TextIO

from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.request import Chunk, draft_runs
from eagle_mlx.text import TextStream

GREEN, DIM = 32, 2
"""Codes of ANSI escape sequences (ECMA-48, section 8.3.117)."""
COLOR_HELP = "show accepted drafts in green; not if the output is no terminal, or if NO_COLOR is set"


def has_color(stream: TextIO) -> bool:
    """Return whether a stream is a terminal with colors, and the user has not set NO_COLOR (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, code: int) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if text else ""


def renderer(tokenizer: TokenizerWrapper | None, stop: Sequence[str], color: bool) -> Callable[[Chunk], str]:
    """Return a function that turns the chunks of one stream into text, if `color` with accepted draft tokens in green.

    stop: the request's stop strings. A character of several tokens has the color of its last token.
    """
    if not color or tokenizer is None:
        return attrgetter("text")
    texts = TextStream(tokenizer, stop)

    def render(chunk: Chunk) -> str:
        pieces = []
        for part, drafted in draft_runs(chunk.from_draft):
            is_last = chunk.output is not None and part.stop == len(chunk.tokens)
            text = texts.finish(chunk.output.text) if is_last and chunk.output else texts.push(chunk.tokens[part])
            pieces.append(painted(text, GREEN) if drafted else text)
        return "".join(pieces)

    return render
