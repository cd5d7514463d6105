"""From tokens to text: incremental decoding, stop strings, template arguments and loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_CHARACTER = 4  # bytes of the longest character (RFC 3629, section 3), which is also the most tokens that it can take


class IncrementalText:
    """Decodes the text that new tokens add, with the tokenizer's own `decode`.

    It decodes only tokens that are not settled yet, with the last settled ones for context, so that the work does not
    grow with the text. Unlike mlx-lm's streaming detokenizers, it keeps a leading space and NUL bytes.
    """

    def __init__(self, tokenizer: TokenizerWrapper):
        self._tokenizer = tokenizer
        self.window: list[int] = []  # tokens that are decoded again with the next one
        self._settled = 0

    def add(self, tokens: Sequence[int]) -> tuple[str, str]:
        """Add tokens; return the newly certain text, and what may still change and end with U+FFFD."""
        self.window += tokens
        before, text = self._decoded(self._settled), self._decoded(len(self.window))
        end = self._certain(before, text)
        certain = text if end == len(self.window) else self._decoded(end)
        if len(certain) <= len(before):  # keep tokens without text: the next one may depend on them
            return "", text[len(before) :]
        self.window, self._settled = self.window[self._settled :], end - self._settled
        return certain[len(before) :], text[len(certain) :]

    def _certain(self, before: str, text: str) -> int:
        """Return how many tokens have text that no later token can change."""
        count = len(self.window)
        if not _ends_open(before, text):
            return count
        if count - self._settled < _CHARACTER:
            return self._settled
        # An incomplete character began with one of the last tokens, after complete text.
        for end in range(count - 1, max(count - _CHARACTER, self._settled), -1):
            if not _ends_open(before, self._decoded(end)):
                return end
        # Otherwise the bytes will never form a character, except perhaps those of the last U+FFFD.
        ends = range(count - 1, self._settled, -1)
        return next((end for end in ends if text[:-1].startswith(self._decoded(end))), self._settled)

    def _decoded(self, end: int) -> str:
        text: str = self._tokenizer.decode(self.window[:end])
        return text


def common_prefix(a: str | list[int], b: str | list[int]) -> int:
    """Return the length of two texts' or two lists' common prefix. Bisects, because comparing items is slow."""
    same, most = 0, min(len(a), len(b))
    while same < most:
        middle = (same + most + 1) // 2
        same, most = (middle, most) if a[same:middle] == b[same:middle] else (same, middle - 1)
    return same


def _ends_open(before: str, text: str) -> bool:
    """Return whether a text that extends `before` may end with an incomplete character."""
    return len(text) <= len(before) or text.endswith("\ufffd")


class TextStream:
    """Streams text from tokens. It emits only characters that the finished text will have.

    It holds back incomplete characters, and text that may be the start of a stop string.
    """

    def __init__(self, tokenizer: TokenizerWrapper, stop: Sequence[str] = ()):
        self._texts = IncrementalText(tokenizer)
        self._stop = stop
        self._waiting = ""
        self._shown = 0

    def push(self, tokens: Sequence[int], texts: Sequence[str] | None = None) -> str:
        """Add tokens; return the newly certain text. texts: what they add, if it is decoded already."""
        if texts is None:
            texts = self._texts.add(tokens)[:1] if tokens else ()
        text = self._waiting + "".join(texts)
        certain = len(text) - held_back(text, self._stop)
        self._waiting = text[certain:]
        self._shown += certain
        return text[:certain]

    def by_token(self, tokens: Sequence[int]) -> list[str]:
        """Decode tokens for `push`; return the text that each makes certain."""
        return [self._texts.add([token])[0] for token in tokens]

    def finish(self, text: str) -> str:
        """Return the rest of the finished text."""
        return text[self._shown :]


def held_back(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest suffix of the text that is a proper prefix of one of the strings."""
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    ends = ((n, text[len(text) - n :]) for n in range(longest, 0, -1))
    return next((n for n, end in ends if any(s.startswith(end) and s != end for s in stop)), 0)


class StopStrings:
    """Searches a text for stop strings, piece by piece; the work per piece does not grow with the text."""

    def __init__(self, strings: Sequence[str]):
        self.strings = strings
        self._reach = max(map(len, strings)) - 1
        self._tail = ""  # the end of the text, long enough to contain any incomplete string

    def complete(self, certain: str, open_end: str) -> bool:
        """Add what `IncrementalText.add` returned; return whether the text now contains a string."""
        seen = self._tail + certain
        self._tail = seen[len(seen) - min(self._reach, len(seen)) :]
        return any(text in seen + open_end for text in self.strings)

    def cut(self, text: str) -> tuple[str, str | None]:
        """Return the text before the first string, and that string; in a tie, the one that was given first."""
        places = [(at, string) for string in self.strings if (at := text.find(string)) >= 0]
        at, string = min(places, key=lambda place: place[0], default=(len(text), None))
        return text[:at], string


def template_args(tokenizer: TokenizerWrapper | None) -> Mapping[str, Any]:
    """Return a tokenizer's chat template arguments (`adapters.ChatTokenizer`); empty if none were given."""
    return getattr(tokenizer, "template_args", {})


LEAST_DISTINCT = 0.6  # a continuation with a smaller share of distinct 4-grams counts as looping


def distinct_ratio(tokens: Sequence[int], n: int = 4, coming: int = 0) -> float:
    """Return the share of distinct n-grams in a continuation, or the largest share after `coming` more tokens.

    It is 1.0 if the continuation is too short to have any.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return (len(set(grams)) + coming) / (len(grams) + coming) if grams else 1.0


def is_loop(tokens: Sequence[int], least: float = LEAST_DISTINCT, coming: int = 0) -> bool:
    """Return whether a continuation is too repetitive to be measured, whatever the `coming` tokens are."""
    return distinct_ratio(tokens, coming=coming) < least
