"""How many rows decode at once where nobody waits for them: twice as many for as long as that pays."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_mlx.engine import Engine
from eagle_mlx.plan import RoundResult

FIRST_ROWS = 32
"""A beginning that fits small machines: 32 conversations of 500 tokens take 2.4 GB with a model of 8 billion parameters
(36 layers, 8 heads of 128, 16 bits)."""
MOST_ROWS = 256
"""Logits of so many rows take 150 MB where a vocabulary has 150,000 tokens. Keys and values have a limit of their own
(`kv_bytes` of `Engine`)."""
_ROUNDS = 64
"""Rounds over which a number of rows is timed: a minute of a slow CPU, so that no single pause decides."""
_WORTH = 1.1
"""What twice the rows must give: less may be chance, and more rows take more memory."""


@dataclass
class Doubling:
    """Rows at once, doubled while that makes more tokens a second; it goes back once where it does not, and stays.

    What a GPU has to read is the same for any number of rows, until its arithmetic is the slower part. A CPU brings
    weights into shape for each product anew. So the right number is the machine's and the model's, and it is measured.
    """

    rows: int
    most: int = MOST_ROWS
    settled: bool = False
    _before: tuple[int, float] = (0, 0.0)
    """The rows before they were last doubled, and the tokens a second that they made."""
    _full: bool = False
    """Whether all rows have been taken since: the prompts that fill them come first, and are not timed."""
    _rounds: int = 0
    _tokens: int = 0
    _seconds: float = 0.0

    def add(self, active: int, tokens: int, seconds: float) -> None:
        """A round that made so many tokens, while so many rows were taken."""
        if self.settled:
            return
        if not self._full:
            self._full = active >= self.rows
            return
        self._rounds += 1
        self._tokens += tokens
        self._seconds += seconds
        if self._rounds == _ROUNDS:
            self._decide(self._tokens / self._seconds)

    def _decide(self, rate: float) -> None:
        rows, rate_before = self._before
        if rate < _WORTH * rate_before:
            self.rows, self.settled = rows, True
        elif 2 * self.rows > self.most:
            self.settled = True
        else:
            self._before = self.rows, rate
            self.rows *= 2
            self._full, self._rounds, self._tokens, self._seconds = False, 0, 0, 0.0


def let_grow(engine: Engine) -> Engine:
    """The engine, with as many rows at once as pay; `max_batch` is what it begins with. Text does not depend on it."""
    doubling = Doubling(engine.max_batch)

    def observe(result: RoundResult) -> None:
        doubling.add(engine.active, result.emitted, result.seconds)
        engine.max_batch = doubling.rows

    engine.observer = observe
    return engine
