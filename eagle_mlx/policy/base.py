"""The protocol between a policy and the engine, and policies that do not measure time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from eagle_mlx.errors import require
from eagle_mlx.plan import PLAIN, Context, Plan, RoundResult

_DEEPEST = 1024  # a policy makes a plan of each size up to its limit: 10,000 took more than 15 s
_EXPLORE_EVERY = 32  # plain rounds per exploring round, which takes about a quarter longer: less than 1 % in all


class Policy(Protocol):
    """Plans each round and learns from its result. Use one policy for one engine and proposer."""

    @property
    def wants_trees(self) -> bool:
        """Whether some plans are trees."""

    @property
    def acceptance(self) -> float | None:
        """The share of draft tokens that it expects to be accepted, for metrics; None if unknown. Thread-safe."""

    def plan(self, context: Context) -> Plan:
        """Return the plan of the next round, and change nothing: the engine may ask several times."""

    def observe(self, result: RoundResult) -> None:
        """Learn from a finished round. Nothing else changes a policy."""


@dataclass(frozen=True)
class FixedPolicy:
    """Returns the same plan for every round. Rows with a source draft from it; then, the others draft chains."""

    k: int
    """Draft tokens of each row."""
    nodes: int = 0
    """If more than k, draft a tree of this many tokens and at most k levels instead of a chain."""
    acceptance = None

    def __post_init__(self) -> None:
        check_depths(k=self.k, nodes=self.nodes)

    @property
    def wants_trees(self) -> bool:
        return self.nodes > self.k > 0

    def plan(self, context: Context) -> Plan:
        return Plan(self.k, self.nodes, lookups=(self.k,) * len(context.sources)).within(context.can, context.sources)

    def observe(self, result: RoundResult) -> None:
        """Learn nothing."""


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
    acceptance: float = field(default=0.7, init=False)
    """The moving average. It begins in the middle band."""
    wants_trees = False
    _plain_rounds: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_depths(k=self.k, disable_at_rows=self.disable_at_rows)
        require("alpha", self.alpha, float, "a number from 0 to 1", 0, 1)
        require("threshold", self.threshold, float, "a number from 0 to 1", 0, 1)

    def plan(self, context: Context) -> Plan:
        return PLAIN if 0 < self.disable_at_rows <= context.rows + context.elsewhere else Plan(self._depth())

    def _depth(self) -> int:
        if self.acceptance < self.threshold:
            return min(1, self.k) if self._plain_rounds >= _EXPLORE_EVERY - 1 else 0
        if not self.adaptive or self.acceptance >= 0.8:
            return self.k
        return min(self.k, max(1, self.k - 2) if self.acceptance >= 0.5 else 1)

    def observe(self, result: RoundResult) -> None:
        self._plain_rounds = 0 if result.plan.size else self._plain_rounds + 1
        if drafted := sum(result.drafted_freely):
            accepted = sum(map(min, result.accepted, result.drafted_freely))
            self.acceptance += self.alpha * (accepted / drafted - self.acceptance)


def check_depths(**values: int) -> None:
    """Raise ConfigError, with the name, if a value is no number of tokens or rows."""
    for name, value in values.items():
        require(name, value, int, f"an integer from 0 to {_DEEPEST}", 0, _DEEPEST)
