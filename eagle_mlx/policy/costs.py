"""What rounds cost here and now, by rows and by how much was drafted."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_ACCIDENT = 3.0
"""Rounds that take more than so many times what was expected are taken for that much: something else had the machine.
"""


class Costs:
    """Seconds of a round by (rows, draft tokens): the median of the latest, or an estimate from those of its like."""

    _LATEST = 7

    def __init__(self) -> None:
        self._samples: dict[tuple[int, int], deque[float]] = {}
        self._curves: dict[int, dict[int, float]] = {}
        """By rows, then by size."""

    def add(self, rows: int, size: int, seconds: float) -> None:
        expected = self.estimate(rows, size)
        if expected is not None and rows in self._curves:
            seconds = min(seconds, _ACCIDENT * expected)
        samples = self._samples.setdefault((rows, size), deque(maxlen=self._LATEST))
        samples.append(seconds)
        self._curves.setdefault(rows, {})[size] = sorted(samples)[(len(samples) - 1) // 2]

    def known(self, rows: int, size: int) -> float | None:
        """As `estimate`, of what was measured itself."""
        return self._curves.get(rows, {}).get(size)

    def estimate(self, rows: int, size: int) -> float | None:
        """Seconds; None before the first round.

        What was not measured has the shape of the nearest number of rows that was measured on both sides of this size,
        or else at the most sizes, and the level of a size that both were measured at.
        """
        own = self._curves.get(rows, {})
        if size in own or not self._curves:
            return own.get(size)

        def unlike(other: int) -> tuple[float, float, int]:
            curve = self._curves[other]
            return (0 if min(curve) <= size <= max(curve) else 1 / len(curve), abs(other - rows), other)

        like = self._curves[min(self._curves, key=unlike)]
        shared = min(own.keys() & like.keys(), key=lambda other: abs(other - size), default=None)
        level = 1.0 if shared is None else own[shared] / like[shared]
        return level * _interpolated(like, size)

    def sure(self, rows: int) -> list[tuple[int, float, int]]:
        """Sizes of drafts with the seconds of their rounds and how often those were measured: twice at least, since a
        single round may have been an accident.
        """
        counts = {size: len(self._samples[rows, size]) for size in self._curves.get(rows, {}) if size}
        return [(size, self._curves[rows][size], count) for size, count in counts.items() if count > 1]

    @property
    def measured_rows(self) -> set[int]:
        return set(self._curves)


def slope(rows: int, *kinds: Costs) -> float | None:
    """Seconds that a draft token more takes, of all rows: by least squares over the rounds of each kind, or where none
    was measured at two sizes over those of all kinds.

    Of the nearest number of rows where that can be had, and as many times as much as rounds of the first kind take at
    this one; None where there is none such.
    """
    measured = set[int]().union(*(kind.measured_rows for kind in kinds))
    for other in sorted(measured, key=lambda other: (abs(other - rows), other)):
        known = [points for kind in kinds if (points := kind.sure(other))]
        rise, spread = _trend(known)
        if not spread:
            rise, spread = _trend([[point for points in known for point in points]])
        if spread:
            here, there = kinds[0].estimate(rows, 0), kinds[0].estimate(other, 0)
            return max(rise, 0.0) / spread * (here / there if here and there else 1.0)
    return None


def _trend(groups: Sequence[Sequence[tuple[int, float, int]]]) -> tuple[float, float]:
    """How seconds go along with sizes within groups: the sums of both deviations' products, and of the squares of the
    latter. Points are sizes, seconds and weights.
    """
    rise = spread = 0.0
    for points in groups:
        total = sum(count for *_, count in points) or 1
        middle = sum(size * count for size, _, count in points) / total
        usual = sum(cost * count for _, cost, count in points) / total
        rise += sum((size - middle) * (cost - usual) * count for size, cost, count in points)
        spread += sum((size - middle) ** 2 * count for size, _, count in points)
    return rise, spread


def _interpolated(curve: dict[int, float], size: int) -> float:
    """The cost at a size from those measured: on a line between its neighbours, beyond them as from end to end."""
    first, last = min(curve), max(curve)
    if first == last:
        return curve[first]
    if first <= size <= last:
        left, right = max(d for d in curve if d <= size), min(d for d in curve if d >= size)
        share = (size - left) / (right - left) if right > left else 0.0
        return curve[left] + share * (curve[right] - curve[left])
    slope = max(curve[last] - curve[first], 0.0) / (last - first)
    end = first if size < first else last
    return max(curve[end] + slope * (size - end), curve[end] / 2)
