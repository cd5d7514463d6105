"""Parts of system prompts that change with every request: the prefix cache could reuse nothing that follows them.

An agent's header in front of its system prompt made a server read 50 s where 3.65 s were enough (vllm-mlx#277).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
