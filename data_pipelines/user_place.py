"""The place in a chat template where the user speaks, so that a target can be asked to write the user's turn.

A model that was trained on whole conversations writes a user's turn when it is given its template up to that place:
Magpie, Xu et al. 2024, arXiv 2406.08464, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.errors import TargetError

from .conversation import Message

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
