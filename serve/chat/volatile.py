"""Parts of system prompts that change with every request, so that nothing behind them could be taken over.

An agent's header in front of its system prompt made a server read 50 s where 3.65 s were enough (vllm-mlx#277).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_mlx.errors import ConfigError

KNOWN = {
    "billing header": r"x-anthropic-billing-header:(?:[ \t]*[\w-]+=[^;\n]*;)+\s*",
}
"""What is left out of system prompts, by name, as regular expressions: what no model is meant to read.

The header is Claude Code's: fields that end in semicolons, one of them a checksum of the request. It may stand in a
block of its own, and then nothing divides it from the text behind it.
"""


@dataclass(frozen=True)
class Volatile:
    """What is left out of the system messages of chats."""

    patterns: tuple[re.Pattern[str], ...] = tuple(map(re.compile, KNOWN.values()))

    @classmethod
    def of(cls, more: Sequence[str] = (), known: bool = True) -> Volatile:
        """The known ones, unless `known` is false, and more. Raises ConfigError for what is no regular expression."""
        patterns = list(cls().patterns) if known else []
        for pattern in more:
            try:
                patterns.append(re.compile(pattern))
            except re.error as e:
                raise ConfigError(f"--volatile {pattern!r} is no regular expression: {e}") from e
        return cls(tuple(patterns))

    def left_out(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages as templates take them, without these parts."""
        return [
            {**message, "content": self._without(message["content"])} if message["role"] == "system" else dict(message)
            for message in messages
        ]

    def _without(self, text: str) -> str:
        for pattern in self.patterns:
            text = pattern.sub("", text)
        return text
