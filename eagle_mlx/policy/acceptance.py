"""How many draft tokens are kept: by position, by rank and by confidence; and a policy that follows their share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from eagle_mlx.errors import ConfigError
from eagle_mlx.plan import CONFIDENCE_LAG, PLAIN, Context, Plan, RoundResult
from eagle_mlx.policy.base import check_depth, check_share

NEUTRAL = 0.5
"""The acceptance of a first draft token before any was judged: it may pay or not."""
_WEIGHT = 2.0
"""Tries for which a first guess stands."""
_DECAY = 0.98
"""What is left of older tries with each new round: half of their weight after 34."""
_INITIAL_RATE = 0.7
_EXPLORE_EVERY = 32
"""Plain rounds between two that explore: one costs about a quarter of a round more, so less than 1 % in all."""


class _Shares:
    """The share of hits of each of several things; older tries fade."""

    def __init__(self) -> None:
        self._tries: list[float] = []
        self._hits: list[float] = []
        self._expected: list[float] = []
        """Tokens by the number of draft tokens, found since the newest round."""

    def _first(self, at: int) -> float:
        """The first guess of a share."""
        raise NotImplementedError

    def rate(self, at: int) -> float:
        return self._hits[at] / self._tries[at] if at < len(self._tries) else self._first(at)

    def _chances(self, count: int) -> Iterable[float]:
        """Of each of so many draft tokens, that it is kept."""
        return map(self.rate, range(count))

    def expected_tokens(self, count: int) -> float:
        """Return the tokens that a row emits in a round with so many draft tokens, the bonus token included."""
        if len(self._expected) <= count:
            self._expected = list(accumulate(self._chances(max(count, len(self._tries))), initial=1.0))
        return self._expected[count]

    def _count(self, at: int, tries: float, hits: float) -> None:
        while at >= len(self._tries):
            self._hits.append(_WEIGHT * self._first(len(self._tries)))
            self._tries.append(_WEIGHT)
        self._expected.clear()
        self._tries[at] = self._tries[at] * _DECAY + tries
        self._hits[at] = self._hits[at] * _DECAY + hits


class AcceptanceByPosition(_Shares):
    """The chance that the draft token at each position is kept, given that those before it were.

    A position that no draft has reached yet is as good as the one before it.
    """

    def _first(self, at: int) -> float:
        return self.rate(min(at, len(self._tries)) - 1) if at and self._tries else NEUTRAL

    def add(self, depth: int, accepted: Sequence[int]) -> None:
        """Count a round of `depth` draft tokens that kept accepted[i] of them in row i; a row without any kept none."""
        for position in range(depth):
            tries = sum(kept >= position for kept in accepted)
            if tries:
                self._count(position, tries, sum(kept > position for kept in accepted))

    def _chances(self, count: int) -> Iterable[float]:
        return accumulate(super()._chances(count), mul)


class AcceptanceByRank(_Shares):
    """The chance that the node of each rank in a tree is kept, the likeliest first.

    The first n of a larger tree are the tree of n, so what each node adds is seen whenever it is drafted.
    """

    def _first(self, at: int) -> float:
        return NEUTRAL / (1 + at)

    def add(self, nodes: int, paths: Sequence[Sequence[int]]) -> None:
        """Count rows of `nodes` draft tokens that kept those of the ranks paths[i]."""
        for rank in range(nodes):
            self._count(rank, len(paths), sum(rank in row for row in paths))


class ConfidenceCalibration(_Shares):
    """How often the next token of a chain was kept, by the confidence of the token that an early exit looks at.

    Confidences need not be right, only larger if drafts are better. They are taken at their word at first.
    """

    _BINS = 10

    def _first(self, at: int) -> float:
        return (at + 0.5) / self._BINS

    def add(self, confidences: Sequence[Sequence[float]], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Count what `RoundResult` has under these names."""
        for position, looked in enumerate(confidences, CONFIDENCE_LAG + 1):
            for confidence, length, kept in zip(looked, drafted, accepted, strict=True):
                if length > position:
                    self._count(min(int(confidence * self._BINS), self._BINS - 1), 1, kept > position)

    def threshold(self, least: float) -> float:
        """Return the confidence below which a further token is kept with a chance of less than `least`."""
        rates = [self.rate(at) for at in range(self._BINS)]
        low = next((at for at in reversed(range(self._BINS)) if rates[at] < least), None)
        if low is None or low == self._BINS - 1:
            return 0.0 if low is None else math.inf
        return (low + 0.5 + (least - rates[low]) / (rates[low + 1] - rates[low])) / self._BINS


@dataclass
class AcceptancePolicy:
    """Follows an exponential moving average of the acceptance rate (accepted over drafted tokens, round by round).

    From 0.8 on it drafts k tokens, from 0.5 on k - 2, from `threshold` on 1, below none; then every 32nd round drafts
    one token, so that drafting comes back when acceptance does. Raises ConfigError for values out of range.
    """

    k: int = 4
    alpha: float = 0.1
    """The weight of the newest round in the average."""
    threshold: float = 0.3
    """Below this rate nothing is drafted."""
    disable_at_rows: int | None = None
    """From this batch size on nothing is drafted; None: at no size."""
    adaptive: bool = True
    """Whether the depth follows the rate while drafting; else it is k."""
    rate: float = field(default=_INITIAL_RATE, init=False)
    """The moving average."""
    _plain_rounds: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_depth("k", self.k)
        check_share("alpha", self.alpha)
        check_share("threshold", self.threshold)
        if self.disable_at_rows is not None and self.disable_at_rows < 1:
            raise ConfigError(f"disable_at_rows must be an integer of at least 1, or None; got {self.disable_at_rows}")

    @property
    def wants_trees(self) -> bool:
        return False

    def plan(self, context: Context) -> Plan:
        if self.disable_at_rows is not None and context.rows >= self.disable_at_rows:
            return PLAIN
        return Plan(self._depth())

    def _depth(self) -> int:
        if self.rate < self.threshold:
            return min(1, self.k) if self._plain_rounds >= _EXPLORE_EVERY - 1 else 0
        if not self.adaptive or self.rate >= 0.8:
            return self.k
        return min(self.k, max(1, self.k - 2) if self.rate >= 0.5 else 1)

    def observe(self, result: RoundResult) -> None:
        self._plain_rounds = 0 if result.plan.depth else self._plain_rounds + 1
        if sum(result.drafted):
            self.rate += self.alpha * (sum(result.accepted) / sum(result.drafted) - self.rate)
