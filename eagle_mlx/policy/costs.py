"""What rounds cost here and now, by rows and by how much was drafted."""

from __future__ import annotations

from collections import deque

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

    def trend(self, rows: int) -> tuple[float, float]:
        """How seconds go along with draft tokens, in rounds that draft: the sums of both deviations' products and of
        the squares of the latter, of which the quotient is the slope by least squares; nothing where it is not known.

        Of the nearest number of rows that was measured at two sizes at least, twice each: a single round may have been
        an accident.
        """
        sure = {
            other: {size: cost for size, cost in curve.items() if size and len(self._samples[other, size]) > 1}
            for other, curve in self._curves.items()
        }
        known = [other for other, curve in sure.items() if len(curve) > 1]
        if not known:
            return 0.0, 0.0
        nearest = min(known, key=lambda other: (abs(other - rows), other))
        points = [(size, cost, len(self._samples[nearest, size])) for size, cost in sure[nearest].items()]
        total = sum(count for *_, count in points)
        middle = sum(size * count for size, _, count in points) / total
        usual = sum(cost * count for _, cost, count in points) / total
        rise = sum((size - middle) * (cost - usual) * count for size, cost, count in points)
        return rise, sum((size - middle) ** 2 * count for size, _, count in points)


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
