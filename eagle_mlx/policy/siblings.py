"""Tokens beside an elastic chain: how many are worth drafting, by what such tokens gave and took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, takewhile

from eagle_mlx.policy.base import FLANK, Beside, Outcome

_FADE = 0.99
"""What is left of the weight of older rounds with each new one."""
_STANDS = 0.7
"""How often the next place of a chain stands, where that is not known."""
_HALF = 0.5
"""What a token takes of the doubt at its place that those before it have left."""
_FURTHER_EVERY, _FURTHER = 16, 2
"""Of so many rounds one has so many tokens more than it should, to see whether that is right still."""


class _Price:
    """Seconds of a token beside the chain, of all rows: by least squares over the lengths of chains and what stood
    beside them.
    """

    _SHARE, _ERROR = 0.5, 0.3
    """The first guess, and how far off it may be: both as shares of a token more in the chain."""

    _LEAST = 0.01
    """What a token more in the chain is taken to need at least, as a share of a round: nothing is free."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._means = [0.0, 0.0, 0.0]
        """Of tokens in the chain, tokens beside it, and seconds."""
        self._products = dict.fromkeys([(0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2)], 0.0)
        """Sums of the products of their deviations."""

    def add(self, length: int, beside: int, seconds: float) -> None:
        values = float(length), float(beside), seconds
        self._weight = self._weight * _FADE + 1
        off = [value - mean for value, mean in zip(values, self._means, strict=True)]
        self._means = [mean + by / self._weight for mean, by in zip(self._means, off, strict=True)]
        for one, other in self._products:
            now = off[one] * (values[other] - self._means[other])
            self._products[one, other] = self._products[one, other] * _FADE + now

    def seconds(self, slope: float) -> float:
        p, slope = self._products, max(slope, self._LEAST * self._means[2])
        guess = self._SHARE * slope
        if not guess:
            return 0.0
        noise = (p[2, 2] - p[0, 2] ** 2 / p[0, 0] if p[0, 0] else p[2, 2]) / max(self._weight, 1.0)
        doubt = max(1.0, noise / (self._ERROR * slope) ** 2)  # the guess stands for so many tokens, squared
        lengths, besides = p[0, 0] + doubt, p[1, 1] + doubt
        by_length, by_beside = p[0, 2] + doubt * slope, p[1, 2] + doubt * guess
        return max(0.0, (by_beside * lengths - by_length * p[0, 1]) / (lengths * besides - p[0, 1] ** 2))


class Siblings:
    """What tokens beside elastic chains are worth and cost here and now.

    A chain's reckoning of how likely it stands says, place by place, how likely it fails there. The likeliest tokens
    beside it take their shares of that, and the number of those that are worth more than they cost is drafted; which
    they are is known on the device alone. What the shares come to is counted: they need only be larger where more is
    kept.
    """

    _BINS, _WEIGHT, _GUESS = 16, 4.0, 0.7
    """Bins of shares, two for each power of two."""

    def __init__(self) -> None:
        self._tries = [self._WEIGHT] * self._BINS
        self._hits = [self._WEIGHT * self._GUESS * 2 ** (-(bin + 0.5) / 2) for bin in range(self._BINS)]
        self._prices: dict[int, _Price] = {}
        self._rounds = 0

    def beside(self, rows: int, pace: float, slope: float, most: int, may_try: bool) -> Beside:
        """For one round.

        pace: tokens per second and row that there are to lose; slope: seconds of a token more in the chain, of all
        rows; most: tokens of a chain and what stands beside it; may_try: whether to try some where none pay.
        """
        least = pace * self.seconds(rows, slope)
        further = _FURTHER if self._rounds % _FURTHER_EVERY == _FURTHER_EVERY - 1 else 0
        self._rounds += 1

        def beside(length: int, chances: Sequence[Sequence[float]]) -> int:
            doubts = [doubts_of(row, length) for row in zip(*chances, strict=True)]
            if not doubts:
                return 0
            count = 0
            if self._pays([max(row) * _HALF for row in doubts], least):  # seldom: the rest need not be put in order
                places = zip(*map(shares_of, doubts), strict=True)
                count = sum(1 for _ in takewhile(lambda place: self._pays(place, least), places))
            count += further if count or may_try else 0
            return max(0, min(count, most - length, FLANK * length))

        return beside

    def _pays(self, shares: Sequence[float], least: float) -> bool:
        """Whether a token in each row that takes such shares is worth `least` on average."""
        return sum(map(self._worth, shares)) >= least * len(shares)

    def seconds(self, rows: int, slope: float) -> float:
        """What a token takes beside the chain, of all rows."""
        nearest = min(self._prices, key=lambda known: (abs(known - rows), known), default=None)
        return (self._prices[nearest] if nearest is not None else _Price()).seconds(slope)

    def add(self, outcome: Outcome, seconds: float) -> None:
        """A round of elastic drafts, with tokens beside its chains or without."""
        for chances, aside in zip(zip(*outcome.chances, strict=True), outcome.aside, strict=False):
            for number, share in enumerate(shares_of(doubts_of(chances, outcome.depth))[: outcome.beside]):
                bin = _bin(share)
                self._tries[bin] = self._tries[bin] * _FADE + 1
                self._hits[bin] = self._hits[bin] * _FADE + (number == aside)
        self._prices.setdefault(len(outcome.accepted), _Price()).add(outcome.depth, outcome.beside, seconds)

    def _worth(self, share: float) -> float:
        """The tokens that one gives."""
        return self._hits[_bin(share)] / self._tries[_bin(share)]


def doubts_of(chances: Sequence[float], length: int) -> list[float]:
    """How likely a chain of so many tokens fails at each place. chances: that it stands down to each of the first."""
    known = [1.0, *chances]
    known += [known[-1] * _STANDS**further for further in range(1, length - len(chances) + 1)]
    return [above - below for above, below in pairwise(known)]


def shares_of(doubts: Sequence[float]) -> list[float]:
    """What the tokens beside a chain take of the doubt at its places, the largest first."""
    return sorted((doubt * _HALF ** (number + 1) for doubt in doubts for number in range(FLANK)), reverse=True)


def _bin(share: float) -> int:
    return min(int(-2 * math.log2(min(max(share, 1e-9), 1.0))), Siblings._BINS - 1)
