"""A conversation: what was said by whom, or plain text."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HELDOUT_ONE_IN = 25
"""One conversation in this many is held out, chosen by a hash of its prompt; of the standard library, one file."""
_SYSTEM = ("system", "developer")


@dataclass(frozen=True)
class Message:
    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further keys that the chat template may read, such as `tool_calls` or `reasoning_content`."""

    def as_dict(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content, **self.extra}


@dataclass(frozen=True)
class Conversation:
    """Either messages or plain text."""

    messages: tuple[Message, ...] = ()
    text: str | None = None
    tools: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    """Definitions of the tools that may be called, for the chat template."""
    origin: str = field(default="", compare=False)
    """Where it came from, for error messages: `file.jsonl:12`."""

    @property
    def turns(self) -> int:
        """How often the user speaks; 0 for plain text."""
        return sum(m.role == "user" for m in self.messages)

    def as_row(self) -> dict[str, Any]:
        """The row of a jsonl file from which `parse_row` makes this conversation again."""
        if self.text is not None:
            return {"text": self.text}
        row: dict[str, Any] = {"messages": [m.as_dict() for m in self.messages]}
        return {**row, "tools": [dict(tool) for tool in self.tools]} if self.tools else row

    def prompt_key(self) -> int:
        """64 bits of a hash of what is asked: the words of all but the assistant and the system, normalised.

        Regenerated answers and other system prompts do not change it, nor do case, spaces and forms of characters, so
        that a prompt and its like are never on two sides of a split.
        """
        return self._key([m for m in self.messages if m.role not in ("assistant", *_SYSTEM)])

    @property
    def is_held_out(self) -> bool:
        """Whether it is on the held-out side, which its prompt alone decides."""
        return self.prompt_key() % HELDOUT_ONE_IN == 0

    def whole_key(self) -> int:
        """64 bits of a hash of all that is said, by whom, calls of tools included; normalised as in `prompt_key`."""
        return self._key(self.messages)

    def _key(self, messages: Sequence[Message]) -> int:
        said = [normal(self.text or "")]
        for message in messages:
            calls = message.extra.get("tool_calls")
            shown = json.dumps(calls, sort_keys=True, default=str) if calls else ""
            said.append(f"{message.role}\0{normal(message.content)}\0{shown}")
        return int.from_bytes(hashlib.blake2s("\0\0".join(said).encode(errors="replace")).digest()[:8], "big")


def normal(text: str) -> str:
    """The text without differences of case, of white space and of forms of characters (NFKC)."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
