"""How long rounds take: seconds by kind, rows and size, and how fast the machine is at present."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from operator import mul

PLAIN_KIND, CHAIN_KIND = "plain", "chain"
_LATEST = 7
"""Rounds of a size whose median counts: odd, and few, so that a change of speed is seen soon."""
_OUTLIER = 3.0
"""A round counts as at most so many times the expected seconds: beyond that, something else had the machine."""
_TRUSTED = 3
"""Rounds of a size that outvote what other sizes let expect: the first may compile kernels or meet an accident."""
_MOVED = 0.01
"""A median that moves by less, half of the margin between arms, counts as before: estimates stay as they are."""

Points = Sequence[tuple[float, float]]
"""Points of a curve, (x, y), in ascending order of x."""


class Drift:
    """How long rounds take now, relative to the same rounds at the machine's usual speed."""

    _FOLLOW = 0.15
    """The share of a change that each round makes up for: six rounds follow it by two thirds."""
    _SUDDEN = 1.3
    """The largest change that one round tells of: more is an accident."""
    _REMEMBER = 0.99
    """The power that is left with each round: what is not measured again is not compared with a speed long gone."""

    def __init__(self) -> None:
        self.factor = 1.0

    def normalized(self, seconds: float, usual: float | None) -> float:
        """Return a round's seconds at the usual speed, at which it would take `usual` if that is known."""
        self.factor **= self._REMEMBER
        if usual is not None:
            change = seconds / (usual * self.factor)
            self.factor *= min(max(change, 1 / self._SUDDEN), self._SUDDEN) ** self._FOLLOW
        return seconds / self.factor


class Costs:
    """Seconds of a round by kind, rows and size: the median of the latest rounds.

    Sizes that were not measured follow the cost curve of the target, at the level of plain rounds. Drafting adds what
    it added at the sizes that were measured. Each size has its own cost: costs rise in steps.
    """

    def __init__(self) -> None:
        self._latest: dict[tuple[str, int, int], deque[float]] = {}
        self._medians: dict[tuple[str, int], dict[int, float]] = {}
        """By kind and rows, then by size."""
        self._estimates: dict[tuple[str, int, int], float] = {}
        """Found since a median has moved."""
        self.curve: Points = ((1, 1.0), (2, 1.3))
        """The tokens that a forward of one row reads, and its seconds; before it is measured, a slope between those of
        the chips (DESIGN.md, platform facts), from flat to a whole plain round for each further token."""

    def add(self, kind: str, rows: int, size: int, seconds: float) -> None:
        """Take the seconds of a round with `size` draft tokens in each row."""
        most = _OUTLIER * self.estimate(kind, rows, size) if self._medians else math.inf
        latest = self._latest.setdefault((kind, rows, size), deque(maxlen=_LATEST))
        latest.append(min(seconds, most))
        medians, median = self._medians.setdefault((kind, rows), {}), sorted(latest)[(len(latest) - 1) // 2]
        if len(latest) <= _TRUSTED or abs(median / medians[size] - 1) > _MOVED:
            medians[size] = median
            self._estimates.clear()

    def known(self, kind: str, rows: int, size: int) -> float | None:
        """Return the median of what was measured."""
        return self._medians.get((kind, rows), {}).get(size)

    def estimate(self, kind: str, rows: int, size: int) -> float:
        """Return the same, or what the curve and the sizes that were measured let expect."""
        key = kind, rows, size
        if key not in self._estimates:
            self._estimates[key] = self._estimate(kind, rows, size)
        return self._estimates[key]

    def _estimate(self, kind: str, rows: int, size: int) -> float:
        known, latest = self.known(kind, rows, size), self._latest.get((kind, rows, size), ())
        if known is not None and kind == PLAIN_KIND:
            return min(known, self._most_for_plain(rows))
        if known is not None and len(latest) >= _TRUSTED:
            return known
        forward = self._forward(rows, size)
        if kind == PLAIN_KIND:
            return forward
        expected = max(forward + self._drafting(kind, rows, size), self._forward(rows, 0))  # the curve may be wrong
        values: list[float] = sorted([*latest, expected])
        return values[(len(values) - 1) // 2]

    def _most_for_plain(self, rows: int) -> float:
        """The longest that a plain round takes by the drafting rounds of these rows, which read more tokens.

        It takes less than they do by the root of what the curve says: the curve may be wrong, and so may they.
        """
        plain = self._on_curve(rows)
        trusted = [key for key, latest in self._latest.items() if key[1] == rows and len(latest) >= _TRUSTED and key[2]]
        shares = [math.sqrt(plain / self._on_curve(rows * (size + 1))) for *_, size in trusted]
        medians = [self._medians[kind, rows][size] for kind, _, size in trusted]
        return min(map(mul, medians, shares), default=math.inf)

    def _on_curve(self, tokens: float) -> float:
        return _on(self.curve, tokens)

    def _forward(self, rows: int, size: int) -> float:
        """The curve's seconds for so many tokens, at the level of plain rounds of the nearest number of rows."""
        near = self._nearest(PLAIN_KIND, rows)
        level = 1.0 if near is None else self._medians[PLAIN_KIND, near][0] / self._on_curve(near)
        return level * self._on_curve(rows * (size + 1))

    def _drafting(self, kind: str, rows: int, size: int) -> float:
        """What rounds of the nearest rows take longer than the target's forward."""
        near = self._nearest(kind, rows)
        points = [] if near is None else self._extras(kind, near, size)
        if not points:
            return 0.0 if kind == CHAIN_KIND else self._drafting(CHAIN_KIND, rows, size)
        return _on([(0, 0.0), *points] if size < points[0][0] else points, size)

    def _extras(self, kind: str, rows: int, size: int) -> list[tuple[float, float]]:
        """By all sizes but this one: what was measured, less the forward."""
        measured = sorted(self._medians[kind, rows].items())
        return [(each, took - self._forward(rows, each)) for each, took in measured if each not in (0, size)]

    def _nearest(self, kind: str, rows: int) -> int | None:
        return min((of for each, of in self._medians if each == kind), key=lambda of: abs(of - rows), default=None)


def _on(points: Points, x: float) -> float:
    """Between two points on a line, before the first at its level, beyond the last as steep as before it, or level."""
    at = bisect_left(points, x, key=lambda point: point[0])
    if at == 0 or len(points) == 1:
        return points[0][1]
    (left, low), (right, high) = points[at - 1 : at + 1] if at < len(points) else points[-2:]
    slope = (high - low) / (right - left)
    return low + slope * (x - left) if at < len(points) else high + max(0.0, slope) * (x - right)
