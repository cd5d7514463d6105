"""The text of tokens that keep coming: what can be shown already, and what must wait."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_lm.tokenizer_utils import TokenizerWrapper


class TextStream:
    """Tokens in, text out, never more than the finished text will hold, and the same characters.

    A character of which only some bytes are there waits for the rest; an end that may become a stop string waits until
    it cannot. Text comes from the tokenizer's own `decode`, on the tokens since the push before: mlx-lm's streaming
    detokenizers drop a leading space and change NUL bytes, which `decode` does not.
    """

    def __init__(self, tokenizer: TokenizerWrapper, stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._told = 0  # how many of those have given their text: they are there for what the others look like
        self._stop = stop
        self._waiting = ""
        self._shown = 0

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is certain after these tokens, from where the last call ended."""
        text = self._waiting + self._new_text(tokens)
        certain = len(text) - held_back(text, self._stop)
        self._waiting = text[certain:]
        self._shown += certain
        return text[:certain]

    def _new_text(self, tokens: Sequence[int]) -> str:
        if not tokens:
            return ""
        self._tokens += tokens
        text: str = self._tokenizer.decode(self._tokens)
        if text.endswith("\ufffd"):  # part of a character, as far as can be told
            return ""
        old = self._tokenizer.decode(self._tokens[: self._told])
        self._tokens = self._tokens[self._told :]
        self._told = len(self._tokens)
        return text[len(old) :]

    def finish(self, text: str) -> str:
        """What is left of the finished text."""
        return text[self._shown :]


def held_back(text: str, stop: Sequence[str]) -> int:
    """The length of the longest end of the text that is the beginning, not the whole, of one of the strings."""
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    ends = ((n, text[len(text) - n :]) for n in range(longest, 0, -1))
    return next((n for n, end in ends if any(s.startswith(end) and s != end for s in stop)), 0)
