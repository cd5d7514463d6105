"""What the latest rounds tell: seconds by size, acceptance by position and by rank, what a confidence is worth."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from eagle_mlx.plan import CONFIDENCE_LAG

_LATEST = 7
"""Rounds of a size whose median counts: odd, and few, so that a change of speed is seen soon."""
_OUTLIER = 3.0
"""A round that takes more than so many times the expected counts as that much: something else had the machine."""
_PRIOR_WEIGHT = 2.0
"""Tries for which a first guess stands."""
_DECAY = 0.98
"""What is left of older trials with each new round: half of their weight after 34."""


class Drift:
    """How long rounds take now, beside the same rounds at the machine's usual speed."""

    _FOLLOW = 0.15
    """How much of a change each round makes up for."""
    _SUDDEN = 1.3
    """The largest change that one round tells of: more is an accident."""
    _REMEMBER = 0.99
    """The power that is left with each new round: what is not measured again must not be compared with a speed long
    gone."""

    def __init__(self) -> None:
        self.factor = 1.0

    def normalized(self, seconds: float, usual: float | None) -> float:
        """A round's seconds as they would be at the usual speed; of that they tell where they usually are `usual`."""
        self.factor **= self._REMEMBER
        if usual is not None:
            change = seconds / (usual * self.factor)
            self.factor *= min(max(change, 1 / self._SUDDEN), self._SUDDEN) ** self._FOLLOW
        return seconds / self.factor


class Costs:
    """Seconds of a round by (rows, size): the median of the latest of that size, between sizes on a line."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], deque[float]] = {}
        self._curves: dict[int, dict[int, float]] = {}
        """By rows, then by size, both in ascending order of size."""

    def add(self, rows: int, size: int, seconds: float, restart: bool = False) -> None:
        """A round of `size` draft tokens. restart: the last ones were long ago, and count as one."""
        expected = self.estimate(rows, size)
        if expected is not None and rows in self._curves:
            seconds = min(seconds, _OUTLIER * expected)
        latest = self._latest.setdefault((rows, size), deque(maxlen=_LATEST))
        if restart and latest:
            latest = self._latest[rows, size] = deque([self._curves[rows][size]], maxlen=_LATEST)
        latest.append(seconds)
        curve = self._curves.get(rows, {}) | {size: sorted(latest)[(len(latest) - 1) // 2]}
        self._curves[rows] = dict(sorted(curve.items()))

    def known(self, rows: int, size: int) -> float | None:
        """The median of what was measured."""
        return self._curves.get(rows, {}).get(size)

    def estimate(self, rows: int, size: int) -> float | None:
        """The same, or what it would be by its neighbours; None before the first round.

        Of rows that were not measured: the curve of the nearest number of rows, at the level of a size that both have.
        """
        own = self._curves.get(rows, {})
        if size in own or not self._curves:
            return own.get(size)
        like = min(self._curves, key=lambda other: (-len(self._curves[other]), abs(other - rows)))
        curve = self._curves[like]
        shared = min(own.keys() & curve.keys(), key=lambda other: abs(other - size), default=None)
        return self._on_curve(like, size) * (1.0 if shared is None else own[shared] / curve[shared])

    def _on_curve(self, rows: int, size: int) -> float:
        """Between two sizes on a line, before the first at its level, beyond the last as steep as drafts are."""
        curve = self._curves[rows]
        sizes = list(curve)
        at = bisect_left(sizes, size)
        if at == 0:
            return curve[sizes[0]]
        left = sizes[at - 1]
        if at == len(sizes):
            return curve[left] + self.per_token(rows) * (size - left)
        return curve[left] + (curve[sizes[at]] - curve[left]) * (size - left) / (sizes[at] - left)

    def per_token(self, rows: int, like: Costs | None = None) -> float:
        """Seconds that a draft token more takes, of all rows: by least squares over drafts of several sizes.

        like: of rounds that cost as much more for each token, whatever else they cost.
        """
        kinds = (self,) if like is None else (self, like)
        for other in sorted({other for kind in kinds for other in kind._curves}, key=lambda other: abs(other - rows)):
            points = [kind._points(other) for kind in kinds]
            for groups in (points, [[point for kind in points for point in kind]]):
                sums = [_trend(group) for group in groups]
                rise = sum(rise for rise, _ in sums)
                spread = sum(spread for _, spread in sums)
                if spread:
                    return max(0.0, rise / spread)
        return 0.0

    def _points(self, rows: int) -> list[tuple[int, float, int]]:
        """Sizes of drafts, their seconds, and how often they were: at least twice, as one may be an accident."""
        curve = self._curves.get(rows, {})
        points = [(size, seconds, len(self._latest[rows, size])) for size, seconds in curve.items() if size]
        return [point for point in points if point[2] > 1]


def _trend(points: Sequence[tuple[int, float, int]]) -> tuple[float, float]:
    """Of points (x, y, weight): the sums of both deviations' products, and of the squares of that of x."""
    total = sum(weight for *_, weight in points) or 1
    middle, level = (sum(point[i] * point[2] for point in points) / total for i in (0, 1))
    rise = sum((x - middle) * (y - level) * weight for x, y, weight in points)
    return rise, sum((x - middle) ** 2 * weight for x, _, weight in points)


class AcceptanceByPosition:
    """The chance that the draft token at each position is kept, given that those before it were; older rounds fade.

    A round counts once for each row. A position that no draft has reached yet has a guess.
    """

    _PRIOR = 0.7

    def __init__(self) -> None:
        self._trials: list[float] = []
        self._hits: list[float] = []

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


class AcceptanceByRank:
    """The chance that the node of each rank is kept, the likeliest first; older rounds fade.

    The first n of a larger tree are the tree of n, so what each node adds is seen whenever it is drafted.
    """

    def __init__(self) -> None:
        self._trials: list[float] = []
        self._hits: list[float] = []

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


class Calibration:
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
