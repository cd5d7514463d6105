"""What tries to make up conversations came to, and why some of them cannot be used."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

from eagle_mlx.progress import counted
from eagle_mlx.text import is_loop

LEAST_WORDS = 3
"""Words of a user's turn: with fewer it says nothing that an answer could be about."""
LOOK = 128
"""Tokens after which a text is looked at for loops, so that no time goes into the rest of one. As many as decide
whether a prompt is left out of this project's figures."""
_APOSTROPHE = "['\u2019]"
_IM = f"i{_APOSTROPHE}m"
_EXCUSE = rf"({_IM}|i am) sorry,? but|i apologi[sz]e|as an ai\b|{_IM} (just )?an ai\b"
_UNABLE = rf"(({_IM}|i am) )?sorry,|i (can{_APOSTROPHE}t|cannot|can not|am unable|am not able|won{_APOSTROPHE}t)\b"
_REFUSES = re.compile(rf"({_EXCUSE}|{_UNABLE}|{_IM} (unable|not able)\b)", re.IGNORECASE)
_NO_USER = re.compile(rf"({_EXCUSE})", re.IGNORECASE)
"""A user may well say what they cannot do."""
_ANSWERS = re.compile(
    r"(sure[,!.]|certainly[,!.]|of course[,!.]|absolutely[,!.]|here (is|are) (a|an|the|some|your)\b|here's (a|an|the)\b"
    r"|i'd be happy to|i'm happy to|hello! how can i|how can i (help|assist) you|thank you for (asking|your question))",
    re.IGNORECASE,
)


def loops(tokens: Sequence[int]) -> bool:
    """Whether a text repeats itself too much as a whole, or in any `LOOK` tokens from a multiple of that on."""
    return is_loop(tokens) or loops_so_far(tokens)


def loops_so_far(tokens: Sequence[int]) -> bool:
    """What `loops` will say of the whole text, as far as it can be told while the text is written."""
    starts = range(0, len(tokens) - LOOK + 1, LOOK)
    return any(is_loop(tokens[start : start + LOOK]) for start in starts)


def why_no_question(text: str, tokens: Sequence[int], ended: bool, special: Collection[int]) -> str | None:
    """Why a user's turn cannot be used, as a field of `MakeReport`; None where it can.

    `tokens` are those of the turn without its end; `ended` whether it came to one; `special` the ids that stand in no
    text that a user writes.
    """
    if not ended:
        return "endless"
    if any(token in special for token in tokens):
        return "markup"
    if len(text.split()) < LEAST_WORDS:
        return "short"
    if loops(tokens):
        return "question_loops"
    if _NO_USER.match(text) or _ANSWERS.match(text):
        return "no_user"
    return None


def why_no_answer(text: str, tokens: Sequence[int], special: Collection[int]) -> str | None:
    """Why an answer cannot be used, as a field of `MakeReport`; None where it can. `tokens` are without the end."""
    if any(token in special for token in tokens):
        return "markup"
    if not text.strip():
        return "silent"
    if loops(tokens):
        return "answer_loops"
    if _REFUSES.match(text):
        return "refusals"
    return None


class Counts:
    """A dataclass of counters, as plain values and back."""

    def add(self, counts: Sequence[int]) -> None:
        """Add the fields of another of its kind, in their order."""
        for own, count in zip(fields(self), counts, strict=True):  # type: ignore[arg-type]
            setattr(self, own.name, getattr(self, own.name) + count)

    def counts(self) -> tuple[int, ...]:
        return tuple(getattr(self, own.name) for own in fields(self))  # type: ignore[arg-type]


@dataclass
class MakeReport(Counts):
    """Counted over tries, of which each makes one conversation or says by what it failed."""

    tries: int = 0
    tokens: int = 0
    """Of the conversations that were kept, template included."""
    answers: int = 0
    answer_tokens: int = 0
    cut: int = 0
    """Answers that ended at `max_tokens`; their conversations end there."""
    shortened: int = 0
    """Conversations that were kept without the later turns that were planned, because one of those failed."""
    heldout: int = 0
    """Conversations on the held-out side."""
    endless: int = 0
    """User's turns that did not end in time."""
    markup: int = 0
    """Turns with special tokens in them."""
    short: int = 0
    """User's turns of hardly a word."""
    question_loops: int = 0
    no_user: int = 0
    """User's turns that an assistant would say."""
    silent: int = 0
    """Empty answers."""
    answer_loops: int = 0
    refusals: int = 0
    """Answers that refuse."""
    duplicates: int = 0
    """Conversations that begin with what another begins with."""
    late: int = 0
    """Tries that the end of the time stopped before anything of them could be kept."""

    @property
    def failed(self) -> int:
        """Tries that gave no conversation."""
        return sum(getattr(self, name) for name in _FAILURES)

    def summary(self) -> str:
        """The counts in two lines."""
        return (
            f"{counted(self.tries - self.failed, 'conversation')} of {counted(self.tokens, 'token')}, "
            f"{counted(self.answers, 'answer')} of "
            f"{self.answer_tokens:,}; {self.heldout:,} on the held-out side, {counted(self.cut, 'answer')} cut, "
            f"{counted(self.shortened, 'conversation')} shorter than planned\n"
            f"{counted(self.tries, 'try')}, {self.failed:,} left out: {self.failures()}"
        )

    def failures(self) -> str:
        """What tries failed by, the most frequent first."""
        said = sorted(((getattr(self, name), text) for name, text in _FAILURES.items()), key=lambda each: -each[0])
        return ", ".join(f"{count:,} {text}" for count, text in said if count) or "none"


_FAILURES = {
    "endless": "user turns without an end",
    "markup": "turns with special tokens",
    "short": "user turns too short",
    "question_loops": "user turns that loop",
    "no_user": "user turns that an assistant would say",
    "silent": "empty answers",
    "answer_loops": "answers that loop",
    "refusals": "refusals",
    "duplicates": "duplicates",
    "late": "stopped because the time was over",
}
