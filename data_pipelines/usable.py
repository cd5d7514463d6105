"""Whether what a target wrote as a user, and as the assistant, is worth learning from."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.decoding.loops import is_loop
from eagle_mlx.errors import TargetError

from .conversation import Message

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


_MARKS = ("\ue0f0\ue0f1", "\ue0f2 \ue0f3\ue0f4")
"""Private-use characters that stand for the user's words. Two, of different make: a place that depends on the words is
none where other words can be written."""


@dataclass(frozen=True)
class UserPlace:
    """Where the user's words begin, and how they end."""

    tokens: tuple[int, ...]
    """All that stands in front of them."""
    stop_token_ids: tuple[int, ...]
    """The special token that the template puts after them. The model's own end-of-sequence tokens end a turn too."""
    stop: tuple[str, ...]
    """The text that the template puts after them, if it does not begin with a special token."""


def find_user_place(
    tokenizer: TokenizerWrapper, messages: Sequence[Message], name: str, opening: str = ""
) -> UserPlace:
    """The place of the user's next turn behind `messages`; `name` is the target's, for error messages.

    With an `opening` it is the place behind these words, with which the user's turn begins.

    Raises TargetError, with what to do instead, where the template refuses the conversation, hides or changes what was
    said before, or puts something else in front of other words.
    """
    found = {_around(tokenizer, messages, mark, name) for mark in _MARKS}
    if len(found) != 1:
        raise _closed(name, "what stands around the user's words depends on them")
    before, after = found.pop()
    if hidden := [m for m in messages if m.content.strip() and m.content.strip() not in before]:
        raise _closed(name, f"it does not show what the {hidden[0].role} says in front of the user's turn")
    # A space at the end would be a token by itself, which no text that the model has read begins with.
    tokens = tuple(tokenizer.encode(before + opening if opening else before.rstrip(" "), add_special_tokens=False))
    if not tokens:
        raise _closed(name, "it puts nothing in front of the user's words, so there is nothing to continue")
    behind = list(tokenizer.encode(after.strip(), add_special_tokens=False))
    if behind and behind[0] in tokenizer.all_special_ids:
        return UserPlace(tokens, (behind[0],), ())
    return UserPlace(tokens, (), (after.strip(),) if after.strip() else ())


def _around(tokenizer: TokenizerWrapper, messages: Sequence[Message], mark: str, name: str) -> tuple[str, str]:
    """Return what the template puts before the user's words, and after them up to the answer."""
    chat = [*(m.as_dict() for m in messages), {"role": "user", "content": mark}]
    try:
        text: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except Exception as e:  # whatever a template raises
        raise _closed(name, f"it refuses the conversation: {e}") from e
    before, found, after = text.partition(mark)
    if not found or mark in after:
        raise _closed(name, "the user's words do not stand in it once, as they were said")
    return before, after


def _closed(name: str, why: str) -> TargetError:
    return TargetError(
        f"the chat template of {name} cannot be opened before the user's turn: {why}; give prompts to answer instead "
        "(eagle-data regenerate --data prompts.jsonl), or another template with --chat-template FILE"
    )
