"""Chains that end where the next token is not worth drafting: what it is worth, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eagle_mlx.policy.base import BEHIND, Enough, Outcome
from eagle_mlx.policy.costs import Costs, slope

_FADE = 0.99
"""What is left of the weight of older rounds with each new one."""
_PACE_FADE = 0.995
"""The same for what elastic chains gain on others, which changes less than what there is to draft."""
_BENEFIT = 1.0
"""What they are taken to give more than is known of them, by the root of how often they were tried: a pace that is not
seen any more stays as it is, so what is faster must not be left for a few rounds of bad luck.
"""
_FURTHER_EVERY = 16
"""Of so many rounds one goes further than it should, to see whether that is right still."""


class Prospects:
    """How often the next token of a chain was kept, by the chance that all before those under way stand.

    The chances are the proposer's own reckoning. They need not be right, only larger where drafts are better: what they
    come to is counted.
    """

    _BINS, _WEIGHT, _GUESS = 10, 4.0, 0.7

    def __init__(self) -> None:
        self._tries = [self._WEIGHT] * self._BINS
        self._hits = [self._WEIGHT * self._GUESS * (n + 0.5) / self._BINS for n in range(self._BINS)]

    def add(self, outcome: Outcome) -> None:
        for place, row_chances in enumerate(outcome.chances, BEHIND + 1):
            for chance, length, kept in zip(row_chances, outcome.drafted, outcome.accepted, strict=True):
                if length > place:
                    bin = self._bin(chance)
                    self._tries[bin] = self._tries[bin] * _FADE + 1
                    self._hits[bin] = self._hits[bin] * _FADE + (kept > place)

    def worth(self, chance: float) -> float:
        """The tokens that a further draft token gives, at this chance."""
        bin = self._bin(chance)
        return self._hits[bin] / self._tries[bin]

    def _bin(self, chance: float) -> int:
        return min(int(max(0.0, min(chance, 1.0)) * self._BINS), self._BINS - 1)  # what is no number counts as 0


@dataclass
class _Pace:
    """Tokens that rounds gave, and those that the fastest short chain promised for their time."""

    tokens: float
    promised: float
    tries: int = 0
    """Rounds, each of them once for each row."""

    def add(self, rows: int, tokens: float, promised: float) -> None:
        self.tries += rows
        self.tokens = self.tokens * _PACE_FADE + tokens
        self.promised = self.promised * _PACE_FADE + promised

    @property
    def advantage(self) -> float:
        """As far as is known, in their favour while that is not much."""
        return self.tokens / self.promised + _BENEFIT / math.sqrt(1 + self.tries)


class ElasticChains:
    """What elastic chains cost and give here and now, beside the short chains of fixed depth that they begin as."""

    _WEIGHT = 20.0
    """For how many tokens a row the first guess stands: they give what others do."""

    def __init__(self) -> None:
        self.prospects, self.costs = Prospects(), Costs()
        self._paces: dict[int, _Pace] = {}
        self._rounds = 0

    def add(self, outcome: Outcome, seconds: float | None, rival: float, more: float = 0.0) -> None:
        """A round. seconds: of its chains, None where they tell nothing; more: of what stood beside them.

        `rival`: tokens per second and row that the fastest short chain promised.
        """
        rows, depth = len(outcome.accepted), outcome.depth
        self._rounds += 1
        self.prospects.add(outcome)
        expected = self.costs.estimate(rows, depth)
        if seconds is not None:
            self.costs.add(rows, depth, seconds)
        usual = self.costs.estimate(rows, depth)
        if usual is None:
            return
        if expected is not None:
            usual = min(usual, 2 * expected)  # the first may have been an accident
        self._pace(rows).add(rows, 1 + sum(outcome.kept) / rows, (usual + more) * rival)

    def _pace(self, rows: int) -> _Pace:
        """Of so many rows; at first as of the nearest number that was seen, or as guessed."""
        if rows not in self._paces:
            like = self._like(rows)
            self._paces[rows] = _Pace(self._WEIGHT, self._WEIGHT * like.promised / like.tokens, like.tries)
        return self._paces[rows]

    def _like(self, rows: int) -> _Pace:
        nearest = min(self._paces, key=lambda known: (abs(known - rows), known), default=None)
        return self._paces[nearest] if nearest is not None else _Pace(1.0, 1.0)

    def advantage(self, rows: int) -> float:
        """Tokens per second, those of the fastest short chain = 1."""
        return self._like(rows).advantage

    def enough(self, pace: float, slope: float) -> Enough:
        """For one round: whether further tokens, one a row, give less than else comes in the time that they take.

        pace: tokens per second and row that there are to lose; slope: seconds of a token more, of all rows.
        """
        least = pace * slope
        spare = 1 if self._rounds % _FURTHER_EVERY == 0 else 0

        def enough(chances: Sequence[float]) -> bool:
            nonlocal spare
            if sum(map(self.prospects.worth, chances)) >= least * len(chances):
                return False
            spare -= 1
            return spare < 0

        return enough

    def slope(self, rows: int, fixed: Costs) -> float:
        """Seconds that a draft token more takes, of all rows; at first from what drafting takes at all.

        fixed: what chains of fixed depths cost, of which a token more costs the same.
        """
        known = slope(rows, fixed, self.costs)
        if known is not None:
            return known
        none, short = fixed.estimate(rows, 0), fixed.estimate(rows, BEHIND)
        return max(short - none, 0.0) / BEHIND if none is not None and short is not None else 0.0
