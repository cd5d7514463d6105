"""Small grammars for tests, and variants with late masks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from eagle_mlx.decoding.processors import walk

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

    def rollback(self, count: int) -> None:
        assert 0 <= count <= len(self.taken)
        self.deepest = max(self.deepest, count)
        del self.taken[len(self.taken) - count :]


class LateSteps(Steps):
    """Returns its masks at the n-th request, with a random n for each draft."""

    def __init__(self, seed: int | np.random.Generator = 0) -> None:
        super().__init__()
        self.rng = np.random.default_rng(seed)
        self.draft: list[int] = []
        self.waiting = False
        self.left = 0
        self.late = 0
        """Number of requests without an answer."""

    def delay(self, draft: Sequence[int]) -> int:
        """Return how many requests for a draft's masks get no answer."""
        return int(self.rng.integers(0, 4))

    def ask(self, draft: Sequence[int]) -> None:
        assert not self.waiting, "nothing else is called before the answer"
        assert self.end not in draft
        self.draft, self.waiting, self.left = list(draft), True, self.delay(draft)

    def answer(self, seconds: float) -> list[mx.array] | None:
        if self.left and seconds < math.inf:
            self.left -= 1
            self.late += 1
            return None
        self.waiting = False
        return walk(self, self.draft)


class Never(LateSteps):
    """Knows its first mask; returns no other until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.waited, self.broken = 0.0, False

    def answer(self, seconds: float) -> list[mx.array] | None:
        if self.broken:
            raise RuntimeError("it takes too long")
        if not self.taken:
            return super().answer(math.inf)
        self.waited += seconds
        return None
