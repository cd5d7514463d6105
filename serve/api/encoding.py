"""Encoding long texts piece by piece, so that a request can end in between. The tokens are those of the whole text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

PIECE = 1 << 16  # characters per piece, which take about 0.1 s
_OVERLAP = 1 << 10
"""Characters of context before and after each piece. Half of them must have the same tokens in both pieces."""


@dataclass(frozen=True)
class _Piece:
    """The tokens of a part of a text."""

    tokens: list[int]
    spans: list[tuple[int, int]]  # where each token begins and ends in the part
    start: int  # where the part begins in the text

    @classmethod
    def of(cls, backend: Any, text: str, start: int, end: int) -> _Piece:
        # Unlike `encode`, this releases the interpreter lock.
        (encoding,) = backend.encode_batch([text[start:end]], add_special_tokens=False)
        return cls(encoding.ids, encoding.offsets, start)

    def index(self, position: int) -> int:
        """Return the index of the first token that begins at or after a position of the text."""
        return bisect_left(self.spans, position - self.start, key=itemgetter(0))

    def position(self, index: int) -> int:
        return self.start + self.spans[index][0] if index < len(self.spans) else -1

    def cut(self, position: int) -> int:
        """Return the index of the last token before a position that begins a character, or 0."""
        index = self.index(position)
        while index := max(0, index - 1):
            before, begin = self.spans[index - 1], self.spans[index][0]
            if before[0] < begin >= before[1]:
                break
        return index

    def between(self, start: int, end: int) -> tuple[list[int], list[int]]:
        part = range(self.index(start), self.index(end))
        return [self.tokens[index] for index in part], [self.position(index) for index in part]


@dataclass(frozen=True)
class Encoder:
    """Encodes the texts of one request."""

    tokenizer: TokenizerWrapper
    check: Callable[[], None]
    """Is called between pieces of the work. Raises if the client left."""

    def __call__(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text. Raises what `check` raises."""
        self.check()
        if len(text) < 2 * PIECE or not getattr(self.tokenizer, "is_fast", False):
            return self._whole(text, add_special_tokens)
        start = text[:_OVERLAP]
        bare, special = self._whole(start, False), self._whole(start, add_special_tokens)
        backend = self.tokenizer.backend_tokenizer
        before = next((i for i in range(len(special)) if special[i : i + len(bare)] == bare), None)
        if not bare or before is None or _Piece.of(backend, start, 0, len(start)).tokens != bare:
            return self._whole(text, add_special_tokens)
        if (tokens := _in_pieces(backend, text, self.check)) is None:
            return self._whole(text, add_special_tokens)
        return [*special[:before], *tokens, *special[before + len(bare) :]]

    def _whole(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))


def _in_pieces(backend: Any, text: str, check: Callable[[], None]) -> list[int] | None:
    """Return the tokens of a text without special tokens around it, or None if the pieces do not fit together.

    A tokenizer decides locally: if a piece, and another that begins later, have the same tokens around a position, then
    both have the tokens of the whole text there, and the text can be cut at that position. The next piece begins
    earlier, at the start of a token. If the tokens differ, for example in a long run of spaces, the piece gets longer.
    """
    tokens: list[int] = []
    start, at, size = 0, 0, PIECE
    while True:
        check()
        end = at + size + _OVERLAP
        piece = _Piece.of(backend, text, start, end)
        first = piece.index(at) if at else 0
        if at and piece.position(first) != at:
            return None
        if end >= len(text):
            return tokens + piece.tokens[first:]
        cut = piece.cut(at + size)
        next_at = piece.position(cut)
        next_start = piece.position(piece.cut(next_at - _OVERLAP))
        around = next_at - _OVERLAP // 2, next_at + _OVERLAP // 2
        if next_start > start and piece.between(*around) == _Piece.of(backend, text, next_start, end).between(*around):
            tokens += piece.tokens[first:cut]
            start, at, size = next_start, next_at, PIECE
        else:
            size *= 4
