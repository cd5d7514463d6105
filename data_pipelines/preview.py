"""What data looks like to whoever trains on it: conversations with what is learnt marked, and their lengths."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from typing import IO

from eagle_mlx.progress import counted

from .chat import Rendered
from .conversation import Conversation

_LEARNT, _OTHER, _HEAD, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BAR = 40
"""Characters of the longest bar."""


def wants_colour(stream: IO[str]) -> bool:
    """Whether to colour what goes there: a terminal that can, and no NO_COLOR (no-color.org) in the environment."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def marked(rendered: Rendered, decode: Callable[[list[int]], str], colour: bool) -> str:
    """The text with the parts to learn in green and the rest faint, or between ⟦ and ⟧ where there is no colour."""
    parts, start = [], 0
    tokens, mask = rendered
    for i in range(1, len(tokens) + 1):
        if i == len(tokens) or mask[i] != mask[start]:
            text = escape_control_characters(decode(tokens[start:i]))
            if colour:
                parts.append(f"{_LEARNT if mask[start] else _OTHER}{text}{_RESET}")
            else:
                parts.append(f"⟦{text}⟧" if mask[start] else text)
            start = i
    return "".join(parts)


def as_text(conversation: Conversation) -> str:
    """A conversation as it is written down, for want of a model to render it for."""
    if conversation.text is not None:
        return escape_control_characters(conversation.text)
    lines = [f"[tools] {json.dumps(list(conversation.tools), ensure_ascii=False)}"] if conversation.tools else []
    for message in conversation.messages:
        lines.append(f"[{message.role}] {message.content}")
        lines += [f"  {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in message.extra.items()]
    return escape_control_characters("\n".join(lines))


def heading(text: str, colour: bool) -> str:
    return f"{_HEAD}--- {text}{_RESET}" if colour else f"--- {text}"


def escape_control_characters(text: str) -> str:
    """The text with control characters made visible, so that no data can command a terminal."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def histogram(lengths: Sequence[int], unit: str) -> str:
    """How many conversations there are of each length, in bins that double, with the figures that matter."""
    if not lengths:
        return f"no conversations, so no lengths in {unit}"
    ordered = sorted(lengths)
    bins: dict[int, int] = {}
    for length in ordered:
        edge = 16
        while edge < length:
            edge *= 2
        bins[edge] = bins.get(edge, 0) + 1
    edges = [16 << i for i in range((max(bins) // 16).bit_length()) if 16 << i >= min(bins)]
    most = max(bins.values())
    width = max(len(f"{edge:,}") for edge in edges)
    lines = [
        f"  up to {edge:>{width},}  {'█' * round(_BAR * bins.get(edge, 0) / most):{_BAR}}  {bins.get(edge, 0):,}"
        for edge in edges
    ]
    at = [ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 90, 99)]
    figures = (
        f"shortest {ordered[0]:,}, median {at[0]:,}, mean {sum(ordered) / len(ordered):,.0f}, "
        f"90 % below {at[1]:,}, 99 % below {at[2]:,}, longest {ordered[-1]:,}"
    )
    return "\n".join([f"{counted(len(ordered), 'conversation')}, lengths in {unit}:", *lines, figures])
