"""A conversation, and the shapes of rows that it is read from."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle_mlx.errors import DataError

from .mapping import FieldMap
from .stdlib_source import HELDOUT_ONE_IN

SHAPES = """\
  {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
  {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}
  {"prompt": "…", "completion": "…"}   (or a prompt alone, for regenerating)
  {"text": "…"}
A message may hold `tool_calls` and `reasoning_content`, a row `tools`. Other names: --map"""

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
}
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


def parse_row(row: Mapping[str, Any], origin: str, fields: FieldMap | None = None) -> Conversation:
    """Read one row in any of `SHAPES`, or with the names of `fields`.

    Raises DataError naming the row, its keys and the shapes where it cannot be read.
    """
    if fields is not None:
        row = fields.apply(row, origin)
    row = {k: v for k, v in row.items() if v is not None}
    for key in ("messages", "conversations"):
        if key in row:
            messages = _messages(row[key], f"{origin}: `{key}`")
            return Conversation(messages, tools=_tools(row, origin), origin=origin)
    if "prompt" in row:
        turns = [*_turns(row["prompt"], "user", origin)]
        if "completion" in row:
            turns += _turns(row["completion"], "assistant", origin)
        return Conversation(tuple(turns), tools=_tools(row, origin), origin=origin)
    if "text" in row:
        if not isinstance(row["text"], str) or not row["text"]:
            raise DataError(f"{origin}: `text` must be a string that is not empty, not {_show(row['text'])}")
        return Conversation(text=row["text"], origin=origin)
    keys = ", ".join(map(str, row)) or "none"
    raise DataError(
        f"{origin}: the row's keys ({keys}) fit no known shape; name the fields with --map, such as "
        f"--map prompt=question,completion=answer, or bring the row into one of these:\n{SHAPES}"
    )


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
        keys = ", ".join(map(str, item)) or "none"
        raise DataError(
            f"{origin} has no `role` (or ShareGPT's `from`); its keys are: {keys}; name it with --map role=…"
        )
    if content_key not in item and not item.get("tool_calls"):
        keys = ", ".join(map(str, item)) or "none"
        raise DataError(f"{origin} has no `{content_key}`; its keys are: {keys}; name it with --map content=…")
    content = _content(item.pop(content_key, ""), origin)
    if "tool_calls" in item:
        item["tool_calls"] = _calls(item["tool_calls"], origin)
    if not item.get("tool_calls", True):
        del item["tool_calls"]
    return Message(_ROLES.get(role, role), content, item)


def _content(value: Any, origin: str) -> str:
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, Sequence) else [value]
    if all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in parts):
        return "".join(p["text"] for p in parts)
    raise DataError(f"{origin}: the content must be text, not {_show(value)}")


def _calls(value: Any, origin: str) -> list[dict[str, Any]]:
    """Calls of tools with their arguments as objects, as chat templates take them; some sets keep these as JSON."""
    calls = _decoded(value)
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(f"{origin}: `tool_calls` must be a list of objects, not {_show(value)}")
    return [_call(call) for call in calls]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(call)
    if isinstance(out.get("function"), Mapping):
        return {**out, "function": _call(out["function"])}
    if isinstance(out.get("arguments"), str):
        decoded = _decoded(out["arguments"])
        out["arguments"] = decoded if isinstance(decoded, Mapping) else out["arguments"]
    return out


def _tools(row: Mapping[str, Any], origin: str) -> tuple[Mapping[str, Any], ...]:
    value = row.get("tools")
    tools = _decoded(value) if value else []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"{origin}: `tools` must be a list of objects, or its JSON, not {_show(value)}")
    return tuple(tools)


def _decoded(value: Any) -> Any:
    """What a string of JSON stands for; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _show(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 60 else shown[:57] + "…"
