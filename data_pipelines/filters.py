"""What of the conversations is kept: by length, by turns, once each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from eagle_mlx.errors import ConfigError
from eagle_mlx.progress import counted

from .conversation import Conversation

Dedupe = Literal["none", "prompt", "conversation"]

_RANGE = re.compile(r"(\d*):(\d*)")


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, both included."""

    least: int = 0
    most: int | None = None

    def __contains__(self, number: int) -> bool:
        return self.least <= number and (self.most is None or number <= self.most)

    @classmethod
    def parse(cls, text: str, flag: str) -> Range | None:
        """Read `MIN:MAX`, of which one may be left out; None for nothing. Raises ConfigError for anything else."""
        if not text:
            return None
        found = _RANGE.fullmatch(text)
        if found is None or text == ":":
            raise ConfigError(f"{flag} {text}: it must be MIN:MAX, such as 32:4096, :4096 or 32:")
        kept = cls(int(found[1] or 0), int(found[2]) if found[2] else None)
        if kept.most is not None and kept.most < kept.least:
            raise ConfigError(f"{flag} {text}: the largest number is smaller than the least")
        return kept


@dataclass
class ReadReport:
    """Counted while conversations are read."""

    kept: int = 0
    unusable: int = 0
    """Rows left out because they cannot be read."""
    first_unusable: str = ""
    """What was wrong with the first of them."""
    by_turns: int = 0
    by_tokens: int = 0
    duplicates: int = 0

    @property
    def left_out(self) -> int:
        return self.unusable + self.by_turns + self.by_tokens + self.duplicates

    def __str__(self) -> str:
        left_out = {
            "that cannot be used": self.unusable,
            "by their turns": self.by_turns,
            "by their tokens": self.by_tokens,
            "as duplicates": self.duplicates,
        }
        said = ", ".join(f"{count:,} {why}" for why, count in left_out.items() if count)
        first = f"\n  first of those that cannot be used: {self.first_unusable}" if self.unusable else ""
        return f"{counted(self.kept, 'conversation')} read" + (f"; left out: {said}{first}" if said else "")


class Filter:
    """Says which conversations are kept, and counts the others."""

    def __init__(
        self,
        turns: Range | None,
        tokens: Range | None,
        count_tokens: Callable[[Conversation], int] | None,
        dedupe: Dedupe,
        report: ReadReport,
    ):
        self.turns, self.tokens, self.count_tokens = turns, tokens, count_tokens
        self.dedupe, self.report = dedupe, report
        self._seen: set[int] = set()

    def keeps(self, conversation: Conversation) -> bool:
        """Plain text has no turns, and is kept whatever they should be."""
        if self.turns is not None and conversation.text is None and conversation.turns not in self.turns:
            self.report.by_turns += 1
            return False
        if self._known(conversation):
            self.report.duplicates += 1
            return False
        if self.tokens is None or self.count_tokens is None or self.count_tokens(conversation) in self.tokens:
            return True
        self.report.by_tokens += 1
        return False

    def _known(self, conversation: Conversation) -> bool:
        """Whether the like has been met; 64 bits a conversation are remembered, in up to 100 bytes of a set."""
        if self.dedupe == "none":
            return False
        key = conversation.prompt_key() if self.dedupe == "prompt" else conversation.whole_key()
        if key in self._seen:
            return True
        self._seen.add(key)
        return False
