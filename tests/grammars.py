"""Small grammars for tests."""

from __future__ import annotations

import mlx.core as mx

END = 5
"""A stop token of requests that use `Steps`."""


class Steps:
    """Each token is 1 to 9 above the previous one, modulo the vocabulary.

    Other test grammars override `allowed`, or `mask` for speed.
    """

    vocab = 96
    end: int | None = END
    """A token that ends the text, and is never added."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.deepest = 0
        """Tokens of the longest rollback."""

    def allowed(self, token: int) -> bool:
        return not self.taken or 1 <= (token - self.taken[-1]) % self.vocab <= 9

    def mask(self) -> mx.array:
        return mx.array([self.allowed(token) for token in range(self.vocab)])

    def advance(self, token: int) -> bool:
        assert token != self.end, "a token that ends the text is not passed"
        if not self.allowed(token):
            return False
        self.taken.append(token)
        return True

    def forced(self, most: int) -> list[int]:
        """Return tokens while one is allowed."""
        before, tokens = list(self.taken), list[int]()
        while len(tokens) < most and sum(row := self.mask().tolist()) == 1 and (token := row.index(True)) != self.end:
            self.taken.append(token)
            tokens.append(token)
        self.taken = before
        return tokens

    def rollback(self, count: int) -> None:
        assert 0 <= count <= len(self.taken)
        self.deepest = max(self.deepest, count)
        del self.taken[len(self.taken) - count :]
