"""Which part of a chat changes from request to request, so that what is behind it is read anew each time."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from threading import Lock
from typing import Any

_CHATS = 32
"""Chats that a new one is compared with, the latest: more than the clients of one machine have under way."""
_LEAST = 2
"""Messages behind a change that two chats must have in common to be one chat: one alone may be alike by chance."""

Part = tuple[str, bytes]
"""The name of a part, and a digest of what it says."""


class Changes:
    """Compares each chat with those before it, and says of each part once that it has changed. For any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._chats: deque[list[Part]] = deque(maxlen=_CHATS)
        self._said: set[str] = set()

    def note(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str | None:
        """What is to be said of a chat, as templates take it: its one part that another had differently, with the same
        parts behind it."""
        parts = [("tools", _digest(tools))]
        parts += [(f"messages[{at}] ({message['role']})", _digest(message)) for at, message in enumerate(messages)]
        with self._lock:
            goes_on = any(chat == parts[: len(chat)] for chat in self._chats)
            changed = next((found for chat in reversed(self._chats) if (found := _changed(chat, parts))), None)
            if parts not in self._chats:
                self._chats.append(parts)
            if goes_on or changed is None or changed[0] in self._said:
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


def _digest(part: Any) -> bytes:
    return blake2b(json.dumps(part, default=str).encode(errors="replace"), digest_size=16).digest()
