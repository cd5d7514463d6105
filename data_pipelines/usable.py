"""Whether what a target wrote as a user, and as the assistant, is worth learning from."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from eagle_mlx.decoding.loops import is_loop

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
