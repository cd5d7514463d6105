"""An answer as the parts that it is made of, in their order: thoughts, texts and calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..chat import Delta, ToolCall

Kind = Literal["text", "reasoning", "call"]


@dataclass
class Part:
    kind: Kind
    text: str = ""
    call: ToolCall | None = None

    def continues_with(self, other: Part) -> bool:
        """Whether another is more of the same part. Every call is one by itself."""
        return self.kind == other.kind != "call"


def part_of(delta: Delta) -> Part:
    if delta.tool_call is not None:
        return Part("call", call=delta.tool_call)
    return Part("reasoning", delta.reasoning) if delta.reasoning else Part("text", delta.content)


def parts_of(deltas: Iterable[Delta]) -> list[Part]:
    """The whole parts that deltas make up."""
    parts: list[Part] = []
    for part in map(part_of, deltas):
        if parts and parts[-1].continues_with(part):
            parts[-1].text += part.text
        else:
            parts.append(part)
    return parts
