"""Remove text that changes with every request: the prefix cache can reuse nothing after it.

An agent's header before its system prompt made a server prefill for 50 s instead of 3.65 s (vllm-mlx#277).
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
