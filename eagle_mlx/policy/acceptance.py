"""The share of draft tokens that are accepted, by position, rank and confidence; and a policy that follows it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from eagle_mlx.plan import CONFIDENCE_LAG, PLAIN, Context, Plan, RoundResult
from eagle_mlx.policy.base import check_depths, check_share

NEUTRAL = 0.5
"""The acceptance assumed for a first draft token until one was verified: it may pay or not."""
_WEIGHT = 2.0
"""The number of tries that a first guess counts as."""
_DECAY = 0.98
"""The weight that older tries keep with each new round: half of it after 34 rounds."""
_EXPLORE_EVERY = 32
"""Plain rounds per exploring round, which takes about a quarter longer: less than 1 % in all."""


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
        """Return the chance of each draft token to be accepted."""
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
    """The chance that the draft token at each position is accepted, given that those before it were.

    A position without tries has the share of the last position that has some.
    """

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
    """The chance that the node of each rank in a tree is accepted, the likeliest node first.

    The first n nodes of a larger tree are the tree of n nodes, so each round counts for all sizes.
    """

    def add(self, nodes: int, paths: Sequence[Sequence[int]]) -> None:
        """Count a round of `nodes` draft tokens that accepted the ranks paths[i] in row i."""
        for rank in range(nodes):
            self._count(rank, len(paths), sum(rank in row for row in paths))


class ConfidenceCalibration(_Shares):
    """How often the next token of a chain was accepted, by the confidence that an early exit compares.

    Confidences only need to rise with acceptance. At first, they are taken as acceptance.
    """

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


@dataclass
class AcceptancePolicy:
    """Follows an exponential moving average of the acceptance rate (accepted over drafted tokens of a round).

    It drafts k tokens at a rate of at least 0.8, k - 2 from 0.5, 1 from `threshold`, and none below. Every 32nd of
    such plain rounds drafts one token to notice better acceptance. Raises ConfigError for values out of range.
    """

    k: int = 4
    alpha: float = 0.1
    """The weight of the newest round in the average."""
    threshold: float = 0.3
    """Do not draft below this rate."""
    disable_at_rows: int = 0
    """Do not draft if at least this many rows decode, in all groups; 0 sets no limit."""
    adaptive: bool = True
    """Whether the depth follows the rate; if not, it is k."""
    rate: float = field(default=0.7, init=False)
    """The moving average. It begins in the middle band."""
    wants_trees = False
    _plain_rounds: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_depths(k=self.k, disable_at_rows=self.disable_at_rows)
        check_share("alpha", self.alpha)
        check_share("threshold", self.threshold)

    @property
    def acceptance(self) -> float:
        return self.rate

    def plan(self, context: Context) -> Plan:
        return PLAIN if 0 < self.disable_at_rows <= context.rows + context.elsewhere else Plan(self._depth())

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
