"""A conversation: messages or plain text."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eagle_mlx.errors import DataError

HELDOUT_ONE_IN = 25
"""One conversation in this many is held out, chosen by a hash of its prompt. For the standard library, one file."""
SMALL = 500
"""Sources with fewer prompts hold out one in ten, and larger ones at least as many as one of this size. Fifteen of 260
prompts could not tell that an adapted head gained 44 % (benchmarks/results/adapting.yaml)."""
COUNTED = SMALL * HELDOUT_ONE_IN // 10
"""In sources with more prompts, chance holds out as many."""


@dataclass(frozen=True)
class Message:
    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further keys that the chat template may read, such as `tool_calls` or `reasoning_content`."""

    @property
    def asks(self) -> bool:
        """Whether the user or a tool wrote it. Without such a message, a greeting of the assistant is not an answer."""
        return self.role not in ("system", "developer", "assistant")

    @property
    def is_answer(self) -> bool:
        """Whether it is the assistant's. One that calls tools is not, since tool results depend on it."""
        return self.role == "assistant" and "tool_calls" not in self.extra

    def as_dict(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content, **self.extra}


@dataclass(frozen=True)
class Conversation:
    messages: tuple[Message, ...] = ()
    text: str | None = None
    tools: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    images: tuple[object, ...] = field(default=(), hash=False)
    """Sources of the images that marks in the messages stand for (`vision.images`)."""
    origin: str = field(default="", compare=False)
    """Source, for error messages, such as `file.jsonl:12`."""

    @property
    def turns(self) -> int:
        """The number of user messages; 0 for plain text."""
        return sum(m.role == "user" for m in self.messages)

    def check_text(self) -> None:
        """Raise DataError if there are images, which are only captured."""
        if self.images:
            raise DataError(
                f"{self.origin}: conversations with images can only be inspected or captured, for a target that sees; "
                "keep their hidden states with `eagle-data collect`, and train from them with --shards"
            )

    def as_row(self) -> dict[str, Any]:
        """Return a row for a jsonl file. `parse_row` turns it back into this conversation, if it has no images."""
        if self.text is not None:
            return {"text": self.text}
        tools = {"tools": [dict(tool) for tool in self.tools]} if self.tools else {}
        return {"messages": [m.as_dict() for m in self.messages], **tools}

    def opening(self) -> Conversation:
        """Return what precedes the first answer to a question."""
        for position, message in enumerate(self.messages):
            if message.is_answer and any(earlier.asks for earlier in self.messages[:position]):
                return replace(self, messages=self.messages[:position])
        return self

    def prompt_key(self) -> int:
        """Return a 64-bit hash of the normalized text of all messages except the assistant's and the system's."""
        return self._key([m for m in self.messages if m.asks])

    @property
    def is_held_out(self) -> bool:
        """Whether the conversation is in the held-out split. Only its prompt decides."""
        return self.prompt_key() % HELDOUT_ONE_IN == 0

    def whole_key(self) -> int:
        """Return a 64-bit hash of all messages with their roles and tool calls, normalized as in `prompt_key`."""
        return self._key(self.messages)

    def _key(self, messages: Sequence[Message]) -> int:
        texts = [normal(self.text or ""), *map(str, self.images)]
        for message in messages:
            calls = message.extra.get("tool_calls")
            shown = json.dumps(calls, sort_keys=True, default=str) if calls else ""
            texts.append(f"{message.role}\0{normal(message.content)}\0{shown}")
        return int.from_bytes(hashlib.blake2s("\0\0".join(texts).encode(errors="replace")).digest()[:8], "big")


def held_out_prompts(keys: Collection[int]) -> frozenset[int]:
    """Return the prompts to hold out, by their hashes: one in 25, but at least one in ten of a source's first 500, and
    at least two, but at most half."""
    distinct = sorted(set(keys), key=lambda key: (key % HELDOUT_ONE_IN, key))
    least = min(max(2, -(-min(len(distinct), SMALL) // 10)), len(distinct) // 2)
    usual = sum(key % HELDOUT_ONE_IN == 0 for key in distinct)
    return frozenset(distinct[: max(least, usual)])


def normal(text: str) -> str:
    """Return the text with case, white space and character forms (NFKC) normalized."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
