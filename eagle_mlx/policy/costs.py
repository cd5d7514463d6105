"""How long rounds take: seconds by rows and size, and how fast the machine is at present."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from eagle_mlx.policy.base import check_depth, check_positive

_LATEST = 7
"""Rounds of a size whose median counts: odd, and few, so that a change of speed is seen soon."""
_OUTLIER = 3.0
"""A round that takes more than so many times the expected counts as that much: something else had the machine."""
_TRUSTED = 3
"""Rounds of a size that outvote what its neighbours let expect: one that met an accident would hide it for long."""
_NOISE_SHARE = 0.05
"""What a new round counts for the noise: that of some twenty is remembered."""
_MEDIAN_ERROR = math.pi / 2
"""The standard error of the median of n rounds is this times their mean deviation by the root of n, for normal noise.

Both the median's error and the standard deviation have a factor of sqrt(pi / 2) there."""


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
        self._expected: dict[tuple[int, int], float] = {}
        """What the neighbours of a size let expect of it when it was first measured."""
        self._curves: dict[int, dict[int, float]] = {}
        """By rows, then by size, both in ascending order of size."""
        self._noise = 0.1
        """How far rounds are from the median of their size, as a share, in the mean."""

    def add(self, rows: int, size: int, seconds: float, restart: bool = False) -> None:
        """A round of `size` draft tokens. restart: the last ones were long ago, and count as one."""
        usual, expected = self.known(rows, size), self.estimate(rows, size)
        if usual is not None:
            self._noise += _NOISE_SHARE * (min(abs(seconds / usual - 1), 1.0) - self._noise)
        if expected is not None and rows in self._curves:
            seconds = min(seconds, _OUTLIER * expected)
            if usual is None:
                self._expected[rows, size] = expected
        latest = self._latest.setdefault((rows, size), deque(maxlen=_LATEST))
        if restart and usual is not None:
            latest.clear()
            latest.append(usual)
        latest.append(seconds)
        self._set(rows, size, self._median(rows, size))

    def _median(self, rows: int, size: int) -> float:
        """The lower one of two; of few rounds, what was expected is one of them."""
        seconds = list(self._latest[rows, size])
        if len(seconds) < _TRUSTED and (rows, size) in self._expected:
            seconds.append(self._expected[rows, size])
        return sorted(seconds)[(len(seconds) - 1) // 2]

    def _set(self, rows: int, size: int, seconds: float) -> None:
        self._curves[rows] = dict(sorted((self._curves.get(rows, {}) | {size: seconds}).items()))

    def saved(self) -> list[list[float]]:
        """Rows, size and seconds of each that was measured."""
        return [[rows, size, seconds] for rows, curve in self._curves.items() for size, seconds in curve.items()]

    def restore(self, saved: Sequence[tuple[int, int, float]]) -> None:
        """Nothing is known yet. Raises ConfigError for numbers that cannot be."""
        for rows, size, seconds in saved:
            check_depth("rows", rows)
            check_depth("size", size)
            check_positive("seconds", seconds)
            self._latest[rows, size] = deque([seconds] * _TRUSTED, maxlen=_LATEST)
            self._set(rows, size, seconds)

    def known(self, rows: int, size: int) -> float | None:
        """The median of what was measured."""
        return self._curves.get(rows, {}).get(size)

    def error(self, rows: int, size: int) -> float:
        """The standard error of what is known, as a share."""
        return _MEDIAN_ERROR * self._noise / math.sqrt(max(1, len(self._latest.get((rows, size), ()))))

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

    def per_token(self, rows: int, like: Costs | None = None, most: float = math.inf) -> float:
        """Seconds that a draft token more takes, of all rows: by least squares over drafts of several sizes.

        like: of rounds that cost as much more for each token, whatever else they cost; most: the largest size asked.
        """
        kinds = (self,) if like is None else (self, like)
        for other in sorted({other for kind in kinds for other in kind._curves}, key=lambda other: abs(other - rows)):
            points = [[point for point in kind._points(other) if point[0] <= most] for kind in kinds]
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
