"""An index of earlier places of a text's last tokens, in the same text or in others, and of what followed them.

Most tokens are in blocks, sorted so that the places with the longest common suffix stand together: a suffix array
(Manber and Myers 1990) of the text read backward, made by prefix doubling. The newest tokens are searched as bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Sequence

import numpy as np
from numpy.typing import NDArray

REACH = 16
"""The most tokens that a match compares, and that follow it: the default policy's longest draft without a model."""
TAIL = 1024
"""Tokens that are searched as bytes, which takes microseconds. Sorting them takes a quarter of a millisecond."""
_GROWTH = 4
"""A block has at least this many times the tokens of the next, so that a lookup asks few blocks."""
MOST = 1 << 19
"""Tokens of a block. Sorting them takes 0.1 s on one core of a Zen 5, once for as many tokens."""
PLACES = 16
"""Places of a match that are looked at. With 32, replayed answers were as fast."""
_LEAST = 0.4
"""A draft ends before the share of places with all of its tokens falls below this. From 0.3 to 0.5, replayed answers
were as fast to within 3 %."""
_GAP = bytes(4)
"""Stands between texts. A token is stored as its number plus one."""
TOKEN_BYTES = 8
"""Bytes of a token in a block: itself, and its place in the order."""


def last_of(tokens: Sequence[int]) -> bytes:
    """Return the last tokens of a text, up to `REACH`, as they are stored."""
    return _stored(tokens[-REACH:])


def _stored(tokens: Sequence[int]) -> bytes:
    return (np.array(tokens, np.uint32) + 1).astype(">u4").tobytes()


def _backward(data: bytes) -> bytes:
    return np.frombuffer(data, ">u4")[::-1].tobytes()


class Texts:
    """Texts in which to search for the last tokens of another text, or of the newest one here.

    They take eight bytes for each token. Adding takes about a microsecond for each, all in all.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        """The oldest first."""
        self._tail = bytearray()

    @classmethod
    def of(cls, tokens: NDArray[np.uint32]) -> Texts:
        """Return texts with these `tokens`, which end with a text."""
        texts, start, ends = cls(), 0, np.flatnonzero(tokens == 0) + 1
        while start < len(tokens):
            first, after_last = np.searchsorted(ends, [start, start + MOST], "right")
            end = ends[max(first, after_last - 1)]
            texts._blocks.append(_Block(tokens[start:end].astype(">u4").tobytes()))
            start = end
        return texts

    def copy(self) -> Texts:
        """Return the same texts, which do not grow when these do. This takes microseconds."""
        texts = Texts()
        texts._blocks, texts._tail = self._blocks.copy(), self._tail.copy()
        return texts

    @property
    def nbytes(self) -> int:
        return len(self._tail) + sum(block.nbytes for block in self._blocks)

    @property
    def tokens(self) -> NDArray[np.uint32]:
        """All tokens, the oldest first: their numbers plus one, and 0 after each text."""
        pieces = [block.data for block in self._blocks] + [bytes(self._tail)]
        return np.frombuffer(b"".join(pieces), ">u4").astype(np.uint32)

    def add(self, tokens: Sequence[int]) -> None:
        """Add the next tokens of the newest text."""
        self._sort_if_long()  # before, so that no text which is added at once lies in two blocks
        self._tail += _stored(tokens)

    def end(self) -> None:
        """End the newest text: what is added next does not continue it."""
        self._tail += _GAP
        self._sort_if_long()

    def _sort_if_long(self) -> None:
        if len(self._tail) <= 4 * TAIL:
            return
        data = bytes(self._tail)
        self._tail.clear()
        while self._blocks and (size := len(self._blocks[-1])) < _GROWTH * len(data) and size + len(data) <= 4 * MOST:
            data = self._blocks.pop().data + data
        self._blocks.append(_Block(data))

    def forget(self) -> None:
        """Drop the oldest tokens."""
        if self._blocks:
            del self._blocks[0]
        else:
            self._tail.clear()

    def longest(self, last: bytes) -> int:
        """Return how many of a text's last tokens occurred here in a row, with a token after them. last: `last_of`."""
        low, high = 0, len(last) // 4
        while low < high:
            middle = (low + high + 1) // 2
            if self._before(len(self._tail), last[-4 * middle :]) >= 0:
                low = middle
            else:
                high = middle - 1
        backward = _backward(last)
        return max([low, *(block.longest(backward) for block in self._blocks)])

    def followers(self, last: bytes) -> list[list[int]]:
        """Return what followed these tokens, up to `REACH` tokens, at up to `PLACES` places, the newest first.

        Tokens are one more than their numbers; 0 is the end of a text.
        """
        rows, at = list[bytes](), len(self._tail)
        while len(rows) < PLACES and (at := self._before(at, last)) >= 0:
            end = at + len(last)
            rows.append(bytes(self._tail[end : end + 4 * REACH]))
            at = end
        backward = _backward(last)
        for block in reversed(self._blocks):
            if len(rows) < PLACES:
                rows += block.followers(backward, PLACES - len(rows))
        return [np.frombuffer(row, ">u4").tolist() for row in rows]

    def _before(self, end: int, tokens: bytes) -> int:
        """Return where these tokens and another occur last before the byte `end` of the tail; -1 if nowhere."""
        at = self._tail.rfind(tokens, 0, end - 4)
        while at > 0 and at % 4:  # between two tokens
            at = self._tail.rfind(tokens, 0, at + len(tokens) - 1)
        return at


class _Block:
    """Tokens that no longer change."""

    def __init__(self, data: bytes):
        self._backward = _backward(data)
        self._order = _sorted(np.frombuffer(self._backward, ">u4"))

    def __len__(self) -> int:
        """Return the bytes of its tokens."""
        return len(self._backward)

    @property
    def data(self) -> bytes:
        return _backward(self._backward)

    @property
    def nbytes(self) -> int:
        return len(self._backward) + self._order.nbytes

    def longest(self, backward: bytes) -> int:
        at = bisect_left(self._order, backward, key=self._before)
        return max((_common(backward, self._before(at)) for at in self._order[max(at - 1, 0) : at + 1]), default=0)

    def followers(self, backward: bytes, most: int) -> list[bytes]:
        size = len(backward)
        start = bisect_left(self._order, backward, key=self._before)
        end = bisect_left(self._order, True, start, key=lambda place: self._before(place)[:size] != backward)
        places = self._order[start : end : -(-(end - start) // most) or 1].tolist()  # spread evenly
        return [_backward(self._backward[max(0, 4 * (place - REACH)) : 4 * place]) for place in places]

    def _before(self, place: int) -> bytes:
        """Return the tokens before a place, the nearest first."""
        return self._backward[4 * place : 4 * (place + REACH)]


def _sorted(tokens: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return all positions but the first, sorted by the `REACH` tokens from there on."""
    _, rank = np.unique(tokens, return_inverse=True)
    for step in (1, 2, 4, 8):
        after = np.zeros_like(rank)
        after[:-step] = rank[step:] + 1
        _, rank = np.unique(rank * (len(tokens) + 1) + after, return_inverse=True)
    order = np.argsort(rank, kind="stable").astype(np.uint32)
    return order[order > 0]


def _common(a: bytes, b: bytes) -> int:
    """Return the number of equal tokens at the beginning."""
    return next((at for at in range(len(a) // 4) if a[4 * at : 4 * at + 4] != b[4 * at : 4 * at + 4]), len(a) // 4)


def likeliest(followers: Sequence[Sequence[int]], written: Container[int] = ()) -> list[int]:
    """Return the tokens that followed most often, each among the places with all tokens before it.

    Tokens that are `written` in the row's own text count twice, because answers copy names and numbers from prompts:
    replayed jobs of one template were 1.5 % faster, and with a factor of four as fast.
    """
    rows, tokens, share = list(followers), list[int](), 1.0
    for at in range(REACH):
        counts = Counter(row[at] for row in rows if len(row) > at)
        if not counts:
            break
        counts += Counter({token: count for token, count in counts.items() if token - 1 in written})
        [(token, count)] = counts.most_common(1)
        share *= count / counts.total()
        if share < _LEAST or not token:  # a gap
            break
        tokens.append(token - 1)
        rows = [row for row in rows if len(row) > at and row[at] == token]
    return tokens
