"""Small grammars that a text follows, and the same with masks that come some steps later."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from eagle_mlx.decoding.masks import walk

END = 5
"""A stop token of requests that use `Steps`."""


class Steps:
    """Each token is 1 to 9 above the one before it, modulo the vocabulary.

    Other grammars of tests change `allowed`, or `mask` if it is faster at once.
    """

    vocab = 96
    end: int | None = END
    """A token that ends the text, and is never passed."""

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
    """Its masks come when they are asked for the n-th time, n drawn anew for each draft."""

    def __init__(self, seed: int | np.random.Generator = 0) -> None:
        super().__init__()
        self.rng = np.random.default_rng(seed)
        self.draft: list[int] = []
        self.waiting = False
        self.left = 0
        self.late = 0
        """Answers that did not come when they were asked for."""

    def delay(self, draft: Sequence[int]) -> int:
        """Return how often the masks of a draft are asked for in vain."""
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
    """Its first mask is known; no other comes until it is let go."""

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
