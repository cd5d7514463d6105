"""A conversation, and the shapes of rows that it is read from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle_mlx.errors import DataError

SHAPES = """\
  {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
  {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}
  {"prompt": "…", "completion": "…"}   (or a prompt alone, for regenerating)
  {"text": "…"}"""

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}


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
    origin: str = field(default="", compare=False)
    """Where it came from, for error messages: `file.jsonl:12`."""

    def as_row(self) -> dict[str, Any]:
        """The row of a jsonl file from which `parse_row` makes this conversation again."""
        return {"text": self.text} if self.text is not None else {"messages": [m.as_dict() for m in self.messages]}

    def prompt_key(self) -> int:
        """A stable number made from everything but the assistant's words: regenerated answers do not change it."""
        said = [self.text or "", *(f"{m.role}\0{m.content}" for m in self.messages if m.role != "assistant")]
        return int.from_bytes(hashlib.blake2s("\0\0".join(said).encode()).digest()[:8], "big")


def parse_row(row: Mapping[str, Any], origin: str) -> Conversation:
    """Read one row in any of `SHAPES`; DataError naming the row, its keys and the shapes otherwise."""
    row = {k: v for k, v in row.items() if v is not None}
    for key in ("messages", "conversations"):
        if key in row:
            return Conversation(_messages(row[key], f"{origin}: `{key}`"), origin=origin)
    if "prompt" in row:
        turns = [*_turns(row["prompt"], "user", origin)]
        if "completion" in row:
            turns += _turns(row["completion"], "assistant", origin)
        return Conversation(tuple(turns), origin=origin)
    if "text" in row:
        if not isinstance(row["text"], str) or not row["text"]:
            raise DataError(f"{origin}: `text` must be a string that is not empty, not {_show(row['text'])}")
        return Conversation(text=row["text"], origin=origin)
    keys = ", ".join(map(str, row)) or "none"
    raise DataError(f"{origin}: the row's keys ({keys}) fit no known shape; these are understood:\n{SHAPES}")


def _turns(value: Any, role: str, origin: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message(role, value),)
    return _messages(value, f"{origin}: the {'prompt' if role == 'user' else 'completion'}")


def _messages(value: Any, origin: str) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(f"{origin} must be a list of messages that is not empty, not {_show(value)}")
    return tuple(_message(item, f"{origin}, message {n}") for n, item in enumerate(value, 1))


def _message(item: Any, origin: str) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f"{origin} must be an object, not {_show(item)}")
    item = {k: v for k, v in item.items() if v is not None}
    role_key, content_key = ("from", "value") if "from" in item else ("role", "content")
    role = item.pop(role_key, None)
    if not isinstance(role, str):
        raise DataError(f"{origin} has no `role` (or ShareGPT's `from`); its keys are: {', '.join(map(str, item))}")
    if content_key not in item and "tool_calls" not in item:
        raise DataError(f"{origin} has no `{content_key}`; its keys are: {', '.join(map(str, item)) or 'none'}")
    content = _content(item.pop(content_key, ""), origin)
    return Message(_ROLES.get(role, role), content, item)


def _content(value: Any, origin: str) -> str:
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, Sequence) else [value]
    if all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in parts):
        return "".join(p["text"] for p in parts)
    raise DataError(f"{origin}: the content must be text, not {_show(value)}")


def _show(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 60 else shown[:57] + "…"
