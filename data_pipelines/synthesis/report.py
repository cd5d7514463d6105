"""Count the results of tries, and decide whether questions and answers are usable."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields

from eagle_mlx.progress import counted
from eagle_mlx.text import is_loop

LEAST_WORDS = 3
"""Minimum number of words in a user turn."""
LOOK = 128
"""Interval in tokens between checks for loops. Benchmarks leave out prompts by the same number."""
_APOSTROPHE = "['\u2019]"
_IM = f"i{_APOSTROPHE}m"
_EXCUSE = rf"({_IM}|i am) sorry,? but|i apologi[sz]e|as an ai\b|{_IM} (just )?an ai\b"
_UNABLE = rf"(({_IM}|i am) )?sorry,|i (can{_APOSTROPHE}t|cannot|can not|am unable|am not able|won{_APOSTROPHE}t)\b"
_REFUSES = re.compile(rf"({_EXCUSE}|{_UNABLE}|{_IM} (unable|not able)\b)", re.IGNORECASE)
_NO_USER = re.compile(rf"({_EXCUSE})", re.IGNORECASE)
"""Does not match refusals, since users may say what they cannot do."""
_ANSWERS = re.compile(
    r"(sure[,!.]|certainly[,!.]|of course[,!.]|absolutely[,!.]|here (is|are) (a|an|the|some|your)\b|here's (a|an|the)\b"
    r"|i'd be happy to|i'm happy to|hello! how can i|how can i (help|assist) you|thank you for (asking|your question))",
    re.IGNORECASE,
)


def loops(tokens: Sequence[int]) -> bool:
    """Return whether a text loops as a whole, or in any block of `LOOK` tokens."""
    return is_loop(tokens) or loops_so_far(tokens)


def loops_so_far(tokens: Sequence[int]) -> bool:
    """Return whether any complete block of `LOOK` tokens loops; this works on unfinished texts."""
    starts = range(0, len(tokens) - LOOK + 1, LOOK)
    return any(is_loop(tokens[start : start + LOOK]) for start in starts)


def why_no_question(text: str, tokens: Sequence[int], ended: bool, special: Collection[int]) -> str | None:
    """Return the first reason why a user turn is unusable, as a field of `MakeReport`, or None.

    `tokens` excludes the end of turn, `ended` tells whether there was one, and users do not write `special` tokens.
    """
    faults = {
        "endless": not ended,
        "markup": any(token in special for token in tokens),
        "short": len(text.split()) < LEAST_WORDS,
        "question_loops": loops(tokens),
        "no_user": _NO_USER.match(text) or _ANSWERS.match(text),
    }
    return next((why for why, found in faults.items() if found), None)


def why_no_answer(text: str, tokens: Sequence[int], special: Collection[int]) -> str | None:
    """Return why an answer is unusable, as a field of `MakeReport`, or None. `tokens` excludes the end of turn."""
    faults = {
        "markup": any(token in special for token in tokens),
        "silent": not text.strip(),
        "answer_loops": loops(tokens),
        "refusals": _REFUSES.match(text),
    }
    return next((why for why, found in faults.items() if found), None)


class Counts:
    """Base of a dataclass of counters, with conversion to plain values."""

    def add(self, counts: Mapping[str, int]) -> None:
        """Add another report's counts."""
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)

    def counts(self) -> dict[str, int]:
        """Return the counts above 0 by name, as in a partial file."""
        return {name: count for name, count in vars(self).items() if count}


def _failure(why: str) -> int:
    """Return a field that counts failures; `why` is for the report."""
    found: int = field(default=0, metadata={"why": why})
    return found


@dataclass
class MakeReport(Counts):
    """Counts of tries. Each try gives one conversation or one failure."""

    tries: int = 0
    tokens: int = 0
    """Tokens of the kept conversations, including the template."""
    answers: int = 0
    answer_tokens: int = 0
    cut: int = 0
    """Answers cut at `max_tokens`; their conversations end there."""
    shortened: int = 0
    """Conversations kept without later planned turns, because one of those failed."""
    heldout: int = 0
    endless: int = _failure("user turns without an end")
    markup: int = _failure("turns with special tokens")
    short: int = _failure(f"user turns of fewer than {LEAST_WORDS} words")
    question_loops: int = _failure("user turns that loop")
    no_user: int = _failure("user turns that sound like an assistant")
    silent: int = _failure("empty answers")
    answer_loops: int = _failure("answers that loop")
    refusals: int = _failure("refusals")
    duplicates: int = _failure("duplicates")
    late: int = _failure("stopped because time was up")

    @property
    def failed(self) -> int:
        """Tries that gave no conversation."""
        return sum(getattr(self, one.name) for one in fields(self) if one.metadata)

    def summary(self) -> str:
        """Return the counts in two lines."""
        return (
            f"{counted(self.tries - self.failed, 'conversation')} of {counted(self.tokens, 'token')}, "
            f"{counted(self.answers, 'answer')} of "
            f"{self.answer_tokens:,}; {self.heldout:,} held out, {counted(self.cut, 'answer')} cut, "
            f"{counted(self.shortened, 'conversation')} shorter than planned\n"
            f"{counted(self.tries, 'try')}, {self.failed:,} failed: {self.failures()}"
        )

    def failures(self) -> str:
        """Return the reasons of failures, the most frequent first."""
        found = [(getattr(self, one.name), one.metadata["why"]) for one in fields(self) if one.metadata]
        return ", ".join(f"{count:,} {why}" for count, why in sorted(found, reverse=True) if count) or "none"
