"""Drafting as much as pays, by what rounds cost and drafts yield here and now."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from eagle_mlx.policy.base import check_depth, check_share

_FIRST_DEPTH = 3
_FIRST_SAMPLES = 3
"""Rounds at depth 0 and at `_FIRST_DEPTH` each before the policy chooses: the first ones may compile kernels."""
_MARGIN = 0.02
"""Of depths whose speeds are this close the shallowest is taken: a guess may be wrong, a token not drafted is free."""
_PROBE_EVERY = 32
"""Rounds from one look at another depth to the next, at least."""


class ThroughputPolicy:
    """Chooses the depth with the most expected tokens per second, 0 included.

    Expected tokens come from the acceptance by draft position, seconds from the rounds' own durations by (rows, depth).
    Every 32nd round may look at a depth beside the best, or at none. Where drafting has lost time against plain
    decoding, those looks wait until the loss is less than `explore` of all the time: a useless proposer costs that
    share and the first few rounds. Raises ConfigError for values out of range.
    """

    def __init__(self, max_depth: int = 5, explore: float = 0.02):
        check_depth("max_depth", max_depth)
        check_share("explore", explore)
        self.max_depth, self.explore = max_depth, explore
        self.costs = Costs()
        self.acceptance = AcceptanceByPosition()
        self._round = self._last_probe = 0
        self._last_seen = dict.fromkeys(range(max_depth + 1), 0)
        self._samples = dict.fromkeys(range(max_depth + 1), 0)
        self._elapsed = self._lost = 0.0

    def depth(self, rows: int) -> int:
        first = min((0, min(_FIRST_DEPTH, self.max_depth)), key=lambda depth: self._samples[depth])
        if self._samples[first] < _FIRST_SAMPLES:
            return first
        best = self._best(rows)
        waits = self._round - self._last_probe < _PROBE_EVERY or self._lost > self.explore * self._elapsed
        return best if waits else self._probe(rows, best)

    def _best(self, rows: int, least: int = 0) -> int:
        """The shallowest depth, from `least` on, that is as fast as the fastest to within the margin."""
        speeds = self._speeds(rows)
        depths = range(min(least, self.max_depth), self.max_depth + 1)
        fastest = max(speeds[depth] for depth in depths)
        return next(depth for depth in depths if speeds[depth] >= (1 - _MARGIN) * fastest)

    def _speeds(self, rows: int) -> list[float]:
        """Expected tokens per second and row, by depth."""
        seconds, speeds = math.inf, []
        for depth in range(self.max_depth, -1, -1):
            # A round costs no more than a deeper one: where it seems to, the machine was busy when it was measured.
            seconds = min(seconds, self.costs.estimate(rows, depth) or math.inf)
            speeds.append(self.acceptance.expected_tokens(depth) / seconds)
        return speeds[::-1]

    def _probe(self, rows: int, best: int) -> int:
        """While drafting, no draft or a neighbour, which was tried the longest ago; else the best way to draft."""
        if best == 0:
            return self._best(rows, least=1)
        others = {0, best - 1, min(best + 1, self.max_depth)} - {best}
        return min(others, key=lambda depth: (self._last_seen[depth], depth))

    def observe(self, depth: int, drafted: Sequence[int], accepted: Sequence[int], seconds: float) -> None:
        if depth > self.max_depth:
            return
        rows = len(accepted)
        self._round += 1
        self._samples[depth] += 1
        self._last_seen[depth] = self._round
        self.costs.add(rows, depth, seconds)
        self.acceptance.add(depth, accepted)
        if depth != self._best(rows):
            self._last_probe = self._round
        self._account(rows, depth, rows + sum(accepted))

    def _account(self, rows: int, depth: int, tokens: int) -> None:
        """What drafting has lost against plain decoding; gains pay losses back, but are no licence for new ones."""
        plain, seconds = self.costs.estimate(rows, 0), self.costs.estimate(rows, depth)
        assert plain is not None
        assert seconds is not None
        self._elapsed += seconds
        if depth:
            self._lost = max(0.0, self._lost + seconds - tokens / rows * min(plain, seconds))


class AcceptanceByPosition:
    """The chance that the draft token at each position is kept, given that those before it were.

    Rates of older tries fade by 2 % with each new one. A position that no draft has reached yet has a guess.
    """

    _GUESS, _WEIGHT, _FADE = 0.7, 2.0, 0.98

    def __init__(self) -> None:
        self._tries: list[float] = []
        self._hits: list[float] = []

    def add(self, depth: int, accepted: Sequence[int]) -> None:
        """A round of `depth` draft tokens kept accepted[i] of them in row i; a row without drafts counts as refused."""
        new = max(0, depth - len(self._tries))
        self._tries += [self._WEIGHT] * new
        self._hits += [self._WEIGHT * self._GUESS] * new
        for position in range(depth):
            tries = sum(kept >= position for kept in accepted)
            hits = sum(kept > position for kept in accepted)
            fade = self._FADE**tries
            self._tries[position] = self._tries[position] * fade + tries
            self._hits[position] = self._hits[position] * fade + hits

    def rate(self, position: int) -> float:
        return self._hits[position] / self._tries[position] if position < len(self._tries) else self._GUESS

    def expected_tokens(self, depth: int) -> float:
        """Tokens that a row emits in a round of this depth, the target's own included."""
        reached, tokens = 1.0, 1.0
        for position in range(depth):
            reached *= self.rate(position)
            tokens += reached
        return tokens


class Costs:
    """Seconds of a round by (rows, depth): the median of the latest ones, or an estimate from those of its like."""

    _LATEST = 7

    def __init__(self) -> None:
        self._samples: dict[tuple[int, int], deque[float]] = {}
        self._curves: dict[int, dict[int, float]] = {}
        """By rows, then by depth."""

    def add(self, rows: int, depth: int, seconds: float) -> None:
        samples = self._samples.setdefault((rows, depth), deque(maxlen=self._LATEST))
        samples.append(seconds)
        self._curves.setdefault(rows, {})[depth] = sorted(samples)[(len(samples) - 1) // 2]

    def estimate(self, rows: int, depth: int) -> float | None:
        """Seconds; None before the first round.

        What was not measured has the shape of the nearest number of rows that was measured on both sides of this depth,
        or else at the most depths, and the level of a depth that both were measured at.
        """
        own = self._curves.get(rows, {})
        if depth in own or not self._curves:
            return own.get(depth)

        def unlike(other: int) -> tuple[float, float, int]:
            curve = self._curves[other]
            return (0 if min(curve) <= depth <= max(curve) else 1 / len(curve), abs(other - rows), other)

        like = self._curves[min(self._curves, key=unlike)]
        shared = min(own.keys() & like.keys(), key=lambda other: abs(other - depth), default=None)
        level = 1.0 if shared is None else own[shared] / like[shared]
        return level * _interpolated(like, depth)


def _interpolated(curve: dict[int, float], depth: int) -> float:
    """The cost at a depth from those measured: on a line between its neighbours, beyond them as from end to end."""
    first, last = min(curve), max(curve)
    if first == last:
        return curve[first]
    if first <= depth <= last:
        left, right = max(d for d in curve if d <= depth), min(d for d in curve if d >= depth)
        share = (depth - left) / (right - left) if right > left else 0.0
        return curve[left] + share * (curve[right] - curve[left])
    slope = max(curve[last] - curve[first], 0.0) / (last - first)
    end = first if depth < first else last
    return max(curve[end] + slope * (depth - end), curve[end] / 2)
