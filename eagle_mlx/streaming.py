"""The text of tokens that keep coming: what it is, what can be shown already, and what must wait."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_lm.tokenizer_utils import TokenizerWrapper


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

    @property
    def waiting(self) -> int:
        """Tokens that have not been settled."""
        return len(self._window) - self._settled

    def add(self, tokens: Sequence[int]) -> str:
        """The text of all tokens that have not been settled; it may end with a part of a character, as U+FFFD."""
        self._window += tokens
        before = self._tokenizer.decode(self._window[: self._settled])
        text: str = self._tokenizer.decode(self._window)
        return text[len(before) :]

    def settle(self) -> None:
        """What `add` gave last has been taken."""
        self._window = self._window[self._settled :]
        self._settled = len(self._window)


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
        text = self._waiting + self._new_text(tokens)
        certain = len(text) - held_back(text, self._stop)
        self._waiting = text[certain:]
        self._shown += certain
        return text[:certain]

    def _new_text(self, tokens: Sequence[int]) -> str:
        new = self._texts.add(tokens) if tokens else ""
        if not tokens or new.endswith("\ufffd"):  # part of a character, as far as can be told
            return ""
        self._texts.settle()
        return new

    def finish(self, text: str) -> str:
        """What is left of the finished text."""
        return text[self._shown :]


def held_back(text: str, stop: Sequence[str]) -> int:
    """The length of the longest end of the text that is the beginning, not the whole, of one of the strings."""
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    ends = ((n, text[len(text) - n :]) for n in range(longest, 0, -1))
    return next((n for n, end in ends if any(s.startswith(end) and s != end for s in stop)), 0)
