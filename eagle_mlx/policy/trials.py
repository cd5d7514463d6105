"""What drafts yield: acceptance by position and by rank, and what a confidence is worth.

Each estimate can be written as plain numbers and read again (`saved`, `restore`): what one engine learnt is where the
next begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from eagle_mlx.errors import ConfigError
from eagle_mlx.plan import CONFIDENCE_LAG
from eagle_mlx.policy.base import check_positive, check_share

_PRIOR_WEIGHT = 2.0
"""Tries for which a first guess stands."""
_DECAY = 0.98
"""What is left of older trials with each new round: half of their weight after 34."""


class _Trials:
    """Tries and hits of several kinds."""

    def __init__(self) -> None:
        self._trials: list[float] = []
        self._hits: list[float] = []

    def saved(self) -> list[list[float]]:
        """Tries and the share of hits of each."""
        return [[trials, hits / trials] for trials, hits in zip(self._trials, self._hits, strict=True)]

    def restore(self, saved: Sequence[Sequence[float]]) -> None:
        """Nothing is known yet. Raises ConfigError for numbers that cannot be."""
        for trials, share in saved:
            check_positive("trials", trials)
            check_share("a share of hits", share)
        self._trials = [trials for trials, _ in saved]
        self._hits = [trials * share for trials, share in saved]


class AcceptanceByPosition(_Trials):
    """The chance that the draft token at each position is kept, given that those before it were; older rounds fade.

    A round counts once for each row. A position that no draft has reached yet has a guess.
    """

    _PRIOR = 0.7

    def add(self, depth: int, accepted: Sequence[int]) -> None:
        """A round of `depth` draft tokens kept accepted[i] of them in row i; a row without drafts counts as refused."""
        new = max(0, depth - len(self._trials))
        self._trials += [_PRIOR_WEIGHT] * new
        self._hits += [_PRIOR_WEIGHT * self._PRIOR] * new
        for position in range(depth):
            trials = sum(kept >= position for kept in accepted)
            if trials:
                hits = sum(kept > position for kept in accepted)
                self._trials[position] = self._trials[position] * _DECAY + trials
                self._hits[position] = self._hits[position] * _DECAY + hits

    def expected_tokens(self, depth: int) -> float:
        """Tokens that a row emits in a round of this depth, the target's own included."""
        rates = [hits / trials for hits, trials in zip(self._hits[:depth], self._trials[:depth], strict=True)]
        rates += [self._PRIOR] * (depth - len(rates))
        kept: float = sum(accumulate(rates, mul))
        return 1.0 + kept


class AcceptanceByRank(_Trials):
    """The chance that the node of each rank is kept, the likeliest first; older rounds fade.

    The first n of a larger tree are the tree of n, so what each node adds is seen whenever it is drafted.
    """

    def add(self, nodes: int, paths: Sequence[Sequence[int]]) -> None:
        """Rows of `nodes` draft tokens kept those of the ranks paths[i]."""
        for rank in range(len(self._trials), nodes):
            self._trials.append(_PRIOR_WEIGHT)
            self._hits.append(_PRIOR_WEIGHT * self._prior(rank))
        for rank in range(nodes):
            self._trials[rank] = self._trials[rank] * _DECAY + len(paths)
            self._hits[rank] = self._hits[rank] * _DECAY + sum(rank in row for row in paths)

    def expected_tokens(self, nodes: int) -> float:
        """Tokens that a row emits in a round with so many draft tokens, the target's own included."""
        seen = sum(hits / trials for hits, trials in zip(self._hits[:nodes], self._trials[:nodes], strict=True))
        return 1.0 + seen + sum(map(self._prior, range(len(self._trials), nodes)))

    @staticmethod
    def _prior(rank: int) -> float:
        return 0.6 / (1 + rank)


class Calibration(_Trials):
    """How often the next token of a chain was kept, by the confidence of the token that an early exit looks at.

    Confidences are the proposer's own reckoning. They need not be right, only larger where drafts are better.
    """

    _BINS, _DECAY, _WEIGHT = 10, 0.99, 4.0

    def __init__(self) -> None:
        self._trials = [self._WEIGHT] * self._BINS
        self._hits = [self._WEIGHT * AcceptanceByPosition._PRIOR * (n + 0.5) / self._BINS for n in range(self._BINS)]

    def add(self, confidences: Sequence[Sequence[float]], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """As in `RoundResult`."""
        for position, looked in enumerate(confidences, CONFIDENCE_LAG + 1):
            for confidence, length, kept in zip(looked, drafted, accepted, strict=True):
                if length > position:
                    bin = min(int(confidence * self._BINS), self._BINS - 1)
                    self._trials[bin] = self._trials[bin] * self._DECAY + 1
                    self._hits[bin] = self._hits[bin] * self._DECAY + (kept > position)

    def restore(self, saved: Sequence[Sequence[float]]) -> None:
        if len(saved) != self._BINS:
            raise ConfigError(f"{len(saved)} bins, not {self._BINS}")
        super().restore(saved)

    def threshold(self, least: float) -> float:
        """The confidence below which a further token is kept with a chance of less than `least`."""
        rates = [hits / trials for hits, trials in zip(self._hits, self._trials, strict=True)]
        bin = self._BINS
        while bin > 0 and rates[bin - 1] >= least:
            bin -= 1
        if bin in (0, self._BINS):
            return 0.0 if bin == 0 else math.inf
        low, high = rates[bin - 1], rates[bin]
        return (bin - 0.5 + (least - low) / (high - low)) / self._BINS
