"""Estimates of a policy: the share of draft tokens that are accepted, and the seconds of rounds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from operator import mul
from statistics import median_low
from typing import Literal

from eagle_mlx.plan import CONFIDENCE_LAG

NEUTRAL = 0.5  # the acceptance assumed for a first draft token until one was verified: it may pay or not
_WEIGHT = 2.0  # the number of tries that a first guess counts as
_DECAY = 0.98  # the weight that older tries keep with each new round: half of it after 34 rounds
ArmKind = Literal["plain", "chain", "early exit", "tree", "n-grams", "mixed"]
_LATEST = 7  # the number of rounds in a median: odd, and small, to notice a change of speed soon
_OUTLIER = 3.0  # a round counts for at most this many times its estimate: other programs slowed down the rest
_TRUSTED = 3
"""The number of rounds that outweigh an estimate: the first round may compile kernels, another may be an outlier."""
_MOVED = 0.01  # ignore smaller changes of a median (half of the margin between arms), so that estimates can be cached

Points = Sequence[tuple[float, float]]  # (x, y) in ascending order of x
_GUESS: Points = ((1, 1.0), (2, 1.3))  # between the curves of M1 to M5, whose slopes are 0 to 1


class _Shares:
    """The share of hits at each index. Older tries count less."""

    def __init__(self) -> None:
        self._tries: list[float] = []
        self._hits: list[float] = []

    def _first_guess(self, at: int) -> float:
        return NEUTRAL / (1 + at)

    def rate(self, at: int) -> float:
        return self._hits[at] / self._tries[at] if at < len(self._tries) else self._first_guess(at)

    def _chances(self, count: int) -> Iterable[float]:
        return map(self.rate, range(count))

    def expected_tokens(self, count: int) -> float:
        """Return the tokens that a row emits in a round with `count` draft tokens, including the bonus token."""
        return sum(self._chances(count), 1.0)

    def _count(self, at: int, tries: float, hits: float) -> None:
        while at >= len(self._tries):
            self._hits.append(_WEIGHT * self._first_guess(len(self._tries)))
            self._tries.append(_WEIGHT)
        self._tries[at] = self._tries[at] * _DECAY + tries
        self._hits[at] = self._hits[at] * _DECAY + hits


class AcceptanceByPosition(_Shares):
    """The chance that the draft token at each position is accepted, given that those before it were. A position without
    tries has the share of the last position that has some."""

    def _first_guess(self, at: int) -> float:
        return self.rate(min(at, len(self._tries)) - 1) if at and self._tries else NEUTRAL

    def add(self, depth: int, accepted: Sequence[int]) -> None:
        """Count a round that accepted accepted[i] of `depth` draft tokens in row i."""
        for position in range(depth):
            tries = sum(kept >= position for kept in accepted)
            if tries:
                self._count(position, tries, sum(kept > position for kept in accepted))

    def _chances(self, count: int) -> Iterable[float]:
        return accumulate(super()._chances(count), mul)


class AcceptanceByRank(_Shares):
    """The chance that the node of each rank in a tree is accepted, the likeliest node first. The first n nodes of a
    larger tree are the tree of n nodes, so each round counts for all sizes."""

    def add(self, nodes: int, paths: Sequence[Sequence[int]]) -> None:
        """Count a round of `nodes` draft tokens that accepted the ranks paths[i] in row i."""
        for rank in range(nodes):
            self._count(rank, len(paths), sum(rank in row for row in paths))


class ConfidenceCalibration(_Shares):
    """The acceptance of a chain's next token, by the confidence that an early exit compares. Confidences only
    need to rise with acceptance. At first, they are taken as acceptance."""

    _BINS = 10

    def _first_guess(self, at: int) -> float:
        return (at + 0.5) / self._BINS

    def add(self, confidences: Sequence[Sequence[float]], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Count the fields of a `RoundResult` that have these names."""
        for position, looked in enumerate(confidences, CONFIDENCE_LAG + 1):
            for confidence, length, kept in zip(looked, drafted, accepted, strict=True):
                if length > position:
                    self._count(min(int(confidence * self._BINS), self._BINS - 1), 1, kept > position)

    def threshold(self, least: float) -> float:
        """Return the confidence below which the next token is accepted with a chance of less than `least`."""
        rates = [self.rate(at) for at in range(self._BINS)]
        low = next((at for at in reversed(range(self._BINS)) if rates[at] < least), None)
        if low is None or low == self._BINS - 1:
            return 0.0 if low is None else math.inf
        return (low + 0.5 + (least - rates[low]) / (rates[low + 1] - rates[low])) / self._BINS


class Drift:
    """The seconds that rounds take now, relative to the machine's usual speed."""

    _FOLLOW = 0.15  # the share of a change that each round follows: two thirds after six rounds
    _SUDDEN = 1.3  # the largest change to learn from one round; more is an outlier
    _REMEMBER = 0.99
    """The exponent that pulls the factor back to 1, because old measurements say little about today's speed."""

    def __init__(self) -> None:
        self.factor = 1.0

    def normalized(self, seconds: float, usual: float | None) -> float:
        """Return a round's seconds at the usual speed. `usual` is its known time at that speed, if any."""
        self.factor **= self._REMEMBER
        if usual is not None:
            change = seconds / (usual * self.factor)
            self.factor *= min(max(change, 1 / self._SUDDEN), self._SUDDEN) ** self._FOLLOW
        return seconds / self.factor


class Costs:
    """Seconds of a round by kind, rows and size: the median of the latest rounds.

    Sizes without measurements follow the target's cost curve, scaled to plain rounds, plus the drafting time of
    measured sizes. Each size has its own cost because costs rise in steps.
    """

    def __init__(self, curve: Points | None = None):
        self._latest: dict[tuple[ArmKind, int, int], deque[float]] = {}
        self._medians: dict[tuple[ArmKind, int], dict[int, float]] = {}  # by kind and rows, then by size
        self.curve: Points = curve or _GUESS  # tokens and seconds of a forward
        self.estimate = cache(self._estimate)
        """Return the seconds to expect of a round of a kind, a number of rows and a size."""

    def add(self, kind: ArmKind, rows: int, size: int, seconds: float) -> None:
        """Learn the seconds of a round with `size` draft tokens in each row."""
        most = _OUTLIER * self.estimate(kind, rows, size) if self._medians else math.inf
        latest = self._latest.setdefault((kind, rows, size), deque(maxlen=_LATEST))
        latest.append(min(seconds, most))
        medians, median = self._medians.setdefault((kind, rows), {}), median_low(latest)
        if len(latest) <= _TRUSTED or abs(median / medians[size] - 1) > _MOVED:
            medians[size] = median
            self.estimate.cache_clear()

    def known(self, kind: ArmKind, rows: int, size: int) -> float | None:
        return self._medians.get((kind, rows), {}).get(size)

    def _estimate(self, kind: ArmKind, rows: int, size: int) -> float:
        measured, latest = self.known(kind, rows, size), self._latest.get((kind, rows, size), ())
        if measured is not None and kind == "plain":
            return min(measured, self._most_for_plain(rows))
        if measured is not None and len(latest) >= _TRUSTED:
            return measured
        forward = self._forward(rows, size)
        if kind == "plain":
            return forward
        expected = max(forward + self._drafting(kind, rows, size), self._forward(rows, 0))  # the curve may be wrong
        return float(median_low([*latest, expected]))

    def _most_for_plain(self, rows: int) -> float:
        """Return an upper bound of a plain round's seconds from measured drafting rounds, which read more tokens. The
        square root of a measured curve's ratio counts, because both may be wrong; a guess could hide drafts forever."""
        trust = 0.0 if self.curve is _GUESS else 0.5
        bounds = (
            self._medians[kind, rows][size] * (_on(self.curve, rows) / _on(self.curve, rows * (size + 1))) ** trust
            for (kind, of, size), latest in self._latest.items()
            if of == rows and size and len(latest) >= _TRUSTED
        )
        return min(bounds, default=math.inf)

    def _forward(self, rows: int, size: int) -> float:
        """Return the seconds of a target forward by the curve, scaled to plain rounds of the nearest row count."""
        near = self._nearest("plain", rows)
        plain = self.known("plain", near, size=0)
        level = 1.0 if plain is None else plain / _on(self.curve, near)
        return level * _on(self.curve, rows * (size + 1))

    def _drafting(self, kind: ArmKind, rows: int, size: int) -> float:
        """Return the seconds of drafting, from rounds of the nearest row count. N-grams draft in no time; for them, it
        is the error of the curve, as at the nearest measured size."""
        near = self._nearest(kind, rows)
        measured = sorted(self._medians.get((kind, near), {}).items())
        points = [(other, took - self._forward(near, other)) for other, took in measured if other not in (0, size)]
        if not points:
            return 0.0 if kind in ("chain", "n-grams") else self._drafting("chain", rows, size)
        if kind == "n-grams":
            at, error = min(points, key=lambda point: abs(point[0] - size))
            return error * self._forward(rows, size) / self._forward(near, at)
        return _on([(0, 0.0), *points] if size < points[0][0] else points, size)

    def _nearest(self, kind: ArmKind, rows: int) -> int:
        """Return the nearest row count with measurements of this kind, or `rows` if there are none."""
        counts = (count for other, count in self._medians if other == kind)
        return min(counts, key=lambda count: abs(count - rows), default=rows)


def _on(points: Points, x: float) -> float:
    """Interpolate linearly; before the first point, keep its value; after the last, keep the slope if it rises."""
    at = bisect_left(points, x, key=lambda point: point[0])
    if at == 0 or len(points) == 1:
        return points[0][1]
    (left, low), (right, high) = points[at - 1 : at + 1] if at < len(points) else points[-2:]
    slope = (high - low) / (right - left)
    return low + slope * (x - left) if at < len(points) else high + max(0.0, slope) * (x - right)
