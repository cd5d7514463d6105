"""Tokens as text: what tokens that keep coming say so far, and a tokenizer whose chat template takes arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

_CHARACTER = 4
"""Bytes of the longest character (RFC 3629, section 3), and so the tokens that it can take."""


class IncrementalText:
    """The text that tokens add to those before them, from the tokenizer's own `decode`.

    Decoded are the tokens that have not been settled, with those settled last before them, for what the others look
    like behind them: the work does not grow with the text. mlx-lm's streaming detokenizers drop a leading space and
    change NUL bytes, which `decode` does not.
    """

    def __init__(self, tokenizer: TokenizerWrapper):
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._settled = 0

    @property
    def length(self) -> int:
        """Tokens that are decoded again with the next."""
        return len(self._window)

    def add(self, tokens: Sequence[int]) -> tuple[str, str]:
        """What is certain now of the text behind that which was certain before, and what follows it for the moment.

        The latter ends with a part of a character, as far as can be told, as U+FFFD.
        """
        self._window += tokens
        before, text = self._decoded(self._settled), self._decoded(len(self._window))
        end = self._certain(before, text)
        certain = "" if end is None else text if end == len(self._window) else self._decoded(end)
        if end is None or len(certain) <= len(before):  # tokens without a text stay, for what the next looks like
            return "", text[len(before) :]
        self._window, self._settled = self._window[self._settled :], end - self._settled
        return certain[len(before) :], text[len(certain) :]

    def _certain(self, before: str, text: str) -> int | None:
        """How many of the tokens make a text that no later token can change; None where that is not known of more."""
        count = len(self._window)
        if not _ends_open(before, text):
            return count
        if count - self._settled < _CHARACTER:
            return None
        # A character that is not complete began with one of the last tokens, behind a text that was whole.
        for end in range(count - 1, max(count - _CHARACTER, self._settled), -1):
            if not _ends_open(before, self._decoded(end)):
                return end
        # None did: what is there are bytes that will never be one, but for those of the last U+FFFD.
        ends = range(count - 1, self._settled, -1)
        return next((end for end in ends if text[:-1].startswith(self._decoded(end))), None)

    def _decoded(self, end: int) -> str:
        text: str = self._tokenizer.decode(self._window[:end])
        return text


def _ends_open(before: str, text: str) -> bool:
    """Whether a text that went on from `before` may end with a part of a character."""
    return len(text) <= len(before) or text.endswith("\ufffd")


class TextStream:
    """Tokens in, text out, never more than the finished text will hold, and the same characters.

    A character of which only some bytes are there waits for the rest; an end that may become a stop string waits until
    it cannot.
    """

    def __init__(self, tokenizer: TokenizerWrapper, stop: Sequence[str] = ()):
        self._texts = IncrementalText(tokenizer)
        self._stop = stop
        self._waiting = ""
        self._shown = 0

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is certain after these tokens, from where the last call ended."""
        new, _ = self._texts.add(tokens) if tokens else ("", "")
        text = self._waiting + new
        certain = len(text) - held_back(text, self._stop)
        self._waiting = text[certain:]
        self._shown += certain
        return text[:certain]

    def finish(self, text: str) -> str:
        """What is left of the finished text."""
        return text[self._shown :]


def held_back(text: str, stop: Sequence[str]) -> int:
    """The length of the longest end of the text that is the beginning, not the whole, of one of the strings."""
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    ends = ((n, text[len(text) - n :]) for n in range(longest, 0, -1))
    return next((n for n, end in ends if any(s.startswith(end) and s != end for s in stop)), 0)


class StopStrings:
    """Watches a text, token by token, for the first of some strings; the work per token does not grow with the text."""

    def __init__(self, strings: Sequence[str], tokenizer: TokenizerWrapper):
        self.strings = strings
        self._texts = IncrementalText(tokenizer)
        self._reach = max(map(len, strings)) - 1
        self._tail = ""
        """The end of the text, as far as a string that is not complete can reach back."""

    @property
    def window(self) -> int:
        """Tokens that the next one is decoded with."""
        return self._texts.length

    def complete(self, token: int) -> bool:
        """Take the next token; whether a string is in the text now."""
        certain, open_end = self._texts.add([token])
        seen = self._tail + certain
        self._tail = seen[len(seen) - min(self._reach, len(seen)) :]
        return any(text in seen + open_end for text in self.strings)

    def cut(self, text: str) -> tuple[str, str | None]:
        """The text up to the earliest string, and that string; of several there, the first that was given."""
        found = [(at, index) for index, string in enumerate(self.strings) if (at := text.find(string)) >= 0]
        if not found:
            return text, None
        at, index = min(found)
        return text[:at], self.strings[index]


class ChatTokenizer(TokenizerWrapper):
    """mlx-lm's tokenizer, with arguments for its chat template: a call that renders a chat need not know them."""

    def __init__(self, tokenizer: TokenizerWrapper, template_args: Mapping[str, Any]):
        """`tokenizer` is given away: the two share all that they know."""
        vars(self).update(vars(tokenizer))
        self._template_args = dict(template_args)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        """As in mlx-lm: messages, `tokenize`, and what the template takes; text, or token ids."""
        return super().apply_chat_template(*args, **{**self._template_args, **kwargs})


def template_args(tokenizer: TokenizerWrapper | None) -> Mapping[str, Any]:
    """What a tokenizer's chat template takes beside messages; empty where nothing was said."""
    return tokenizer._template_args if isinstance(tokenizer, ChatTokenizer) else {}


LEAST_DISTINCT = 0.6
"""A continuation with a smaller share of distinct 4-grams counts as looping."""


def distinct_ratio(tokens: Sequence[int], n: int = 4) -> float:
    """Distinct n-grams per n-gram of a continuation; 1.0 where it is too short to repeat one."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def is_loop(tokens: Sequence[int], least: float = LEAST_DISTINCT) -> bool:
    """Whether a continuation repeats itself too much to be measured."""
    return distinct_ratio(tokens) < least
