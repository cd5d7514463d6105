"""Remove text that changes with every request: the prefix cache can reuse nothing after it.

An agent's header before its system prompt made a server prefill for 50 s instead of 3.65 s (vllm-mlx#277).
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
"""Regular expressions, by name, for text in system prompts that is not meant for a model.

Claude Code writes the header as the first block of its system prompt, with these fields. `cch` is a checksum of the
request. No separator may follow the header. All repeats are bounded, so a match takes constant time.
"""
SEARCHED = 1 << 16
"""Characters of system prompts that are searched per request. Claude Code's system prompt has about 60,000.

An operator's own pattern may take quadratic time: a second for this length, hours for much longer texts.
"""


@dataclass(frozen=True)
class Volatile:
    """Patterns to remove from system messages."""

    patterns: tuple[re.Pattern[str], ...] = tuple(map(re.compile, KNOWN.values()))

    @classmethod
    def of(cls, more: Sequence[str] = (), known: bool = True) -> Volatile:
        """Return the known patterns, unless `known` is false, and more. Raises ConfigError for an invalid one."""
        patterns = list(cls().patterns) if known else []
        for pattern in more:
            try:
                patterns.append(re.compile(pattern))
            except re.error as e:
                raise ConfigError(f"--volatile {pattern!r} is not a regular expression: {e}") from e
        return cls(tuple(patterns))

    def strip(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages without the text that matches a pattern.

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
    """Return text that a chat's prompt contains in any case: user messages, and instructions past `SEARCHED`.

    Its length can be checked before any text is searched or rendered. White space around messages is left out, because
    templates may trim it.
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
"""Number of recent chats to compare a new one with: more than the clients of one machine have at a time."""
_LEAST = 2
"""Two chats must share this many messages after a change to count as one chat; a single one may match by chance."""

Part = tuple[str, int]
"""A part's name, and a hash of its content."""


class Changes:
    """Compares each chat with earlier ones and reports once per part that it has changed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._chats: deque[list[Part]] = deque(maxlen=_CHATS)
        self._said: set[str] = set()

    def note(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str | None:
        """Return a message about a chat if exactly one part differs from an earlier chat, else None."""
        named = {"tools": tools} | {f"messages[{at}] ({one['role']})": one for at, one in enumerate(messages)}
        parts = [(name, hash(json.dumps(part))) for name, part in named.items()]
        with self._lock:
            continues = any(chat == parts[: len(chat)] for chat in self._chats)
            changed = next((found for chat in reversed(self._chats) if (found := _changed(chat, parts))), None)
            if parts not in self._chats:
                self._chats.append(parts)
            if continues or changed is None or changed[0] in self._said:
                return None
            name, equal = changed
            self._said.add(name)
        return (
            f"{name} differs from an earlier request, so the {equal} equal messages after it were read again. "
            "Remove the changing text, or match it with --volatile"
        )


def _changed(before: Sequence[Part], now: Sequence[Part]) -> tuple[str, int] | None:
    """Return the only part in which a chat differs from one that it continues, and how many messages follow it."""
    if len(before) > len(now):
        return None
    differ = [at for at, (old, new) in enumerate(zip(before, now, strict=False)) if old != new]
    if len(differ) != 1 or len(before) - 1 - differ[0] < _LEAST:
        return None
    return now[differ[0]][0], len(before) - 1 - differ[0]
