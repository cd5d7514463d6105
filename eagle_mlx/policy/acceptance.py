"""Drafting more while drafts are accepted, less while they are not, by a moving average."""

from __future__ import annotations

from dataclasses import dataclass, field

from eagle_mlx.errors import ConfigError
from eagle_mlx.plan import PLAIN, Context, Plan, RoundResult
from eagle_mlx.policy.base import check_depth, check_share

_INITIAL_RATE = 0.7
_EXPLORE_EVERY = 32
"""Plain rounds between two that explore: one costs about a quarter of a round more, so less than 1 % in all."""


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
