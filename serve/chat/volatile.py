"""What changes from request to request, so that the prefix cache can reuse nothing that follows it.

An agent's header in front of its system prompt made a server read 50 s where 3.65 s were enough (vllm-mlx#277).
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from eagle_mlx.errors import ConfigError

KNOWN = {
    "billing header": r"\Ax-anthropic-billing-header:"
    r"(?:[ \t]{0,4}(?:cc_version|cc_entrypoint|cc_workload|cch)=[^;\n]{0,128};){1,8}\s{0,8}",
}
"""Regular expressions of what is removed from system prompts, by name: text that no model is meant to read.

Claude Code writes the header as the first block of its system prompt, with these fields. `cch` is a checksum of the
request. No separator may follow the header. All repeats are bounded, so that a match takes constant time.
"""
SEARCHED = 1 << 16
"""Characters of system prompts that are searched in one request. Claude Code's system prompt has about 60,000.

An operator's own pattern may take quadratic time. Over this length, that is a second instead of hours.
"""


@dataclass(frozen=True)
class Volatile:
    """What is removed from the system messages of chats."""

    patterns: tuple[re.Pattern[str], ...] = tuple(map(re.compile, KNOWN.values()))

    @classmethod
    def of(cls, more: Sequence[str] = (), known: bool = True) -> Volatile:
        """Return the known patterns, unless `known` is false, and more. Raises ConfigError for an invalid one."""
        patterns = list(cls().patterns) if known else []
        for pattern in more:
            try:
                patterns.append(re.compile(pattern))
            except re.error as e:
                raise ConfigError(f"--volatile {pattern!r} is no regular expression: {e}") from e
        return cls(tuple(patterns))

    def left_out(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages, as templates take them, without these parts.

        Only the first `SEARCHED` characters of all system messages are searched.
        """
        read, left = [], SEARCHED
        for message in messages:
            searched = min(left, len(message["content"])) if message["role"] == "system" else 0
            left -= searched
            text = message["content"]
            read.append({**message, "content": self._without(text[:searched]) + text[searched:]})
        return read

    def _without(self, text: str) -> str:
        for pattern in self.patterns:
            text = pattern.sub("", text)
        return text


def certain_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return text of a chat that its prompt contains at least: what users say, and instructions that are not searched.

    Its length can be checked before any text is searched or rendered. Templates may trim a message, so that white space
    around it does not count.
    """
    left, texts = SEARCHED, []
    for message in messages:
        text = message["content"]
        if message["role"] == "system":
            left, text = max(0, left - len(text)), text[left:]
        if message["role"] in ("system", "user"):
            texts.append(text.strip())
    return "".join(texts)


_CHATS = 32
"""Chats that a new one is compared with, the latest: more than the clients of one machine have under way."""
_LEAST = 2
"""Messages behind a change that two chats must have in common to be one chat: one alone may be alike by chance."""

Part = tuple[str, int]
"""The name of a part, and a hash of what it says."""


class Changes:
    """Compares each chat with earlier ones, and says of each part once that it has changed. For any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._chats: deque[list[Part]] = deque(maxlen=_CHATS)
        self._said: set[str] = set()

    def note(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str | None:
        """Return what to say of a chat, as templates take it: its only part that an earlier chat had differently."""
        named = {"tools": tools} | {f"messages[{at}] ({one['role']})": one for at, one in enumerate(messages)}
        parts = [(name, hash(json.dumps(part))) for name, part in named.items()]
        with self._lock:
            continues = any(chat == parts[: len(chat)] for chat in self._chats)
            changed = next((found for chat in reversed(self._chats) if (found := _changed(chat, parts))), None)
            if parts not in self._chats:
                self._chats.append(parts)
            if continues or changed is None or changed[0] in self._said:
                return None
            name, behind = changed
            self._said.add(name)
        return (
            f"{name} has changed between two requests that go on alike: the {behind} messages behind it were read "
            "anew. Leave what changes out of it, or name it with --volatile"
        )


def _changed(before: Sequence[Part], now: Sequence[Part]) -> tuple[str, int] | None:
    """The only part in which a chat differs from one that it continues, and how many messages are behind it."""
    if len(before) > len(now):
        return None
    differ = [at for at, (old, new) in enumerate(zip(before, now, strict=False)) if old != new]
    if len(differ) != 1 or len(before) - 1 - differ[0] < _LEAST:
        return None
    return now[differ[0]][0], len(before) - 1 - differ[0]
