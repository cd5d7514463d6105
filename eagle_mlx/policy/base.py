"""The protocol between a policy and the engine, and the simplest policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from eagle_mlx.errors import ConfigError
from eagle_mlx.plan import Context, Plan, RoundResult


class Policy(Protocol):
    """Plans each round and learns from its result. Use one policy for one engine and proposer."""

    @property
    def wants_trees(self) -> bool:
        """Whether some plans are trees."""

    @property
    def acceptance(self) -> float | None:
        """The share of draft tokens that it expects to be accepted, for metrics; None if it estimates none. Another
        thread may read this."""

    def plan(self, context: Context) -> Plan:
        """Return the plan of the next round, and change nothing.

        The engine also asks during a plain round, and dispatches the next round early if it is plain too.
        """

    def observe(self, result: RoundResult) -> None:
        """Learn from a finished round. Nothing else changes a policy."""


@dataclass(frozen=True)
class FixedPolicy:
    """Returns the same plan for every round, drafted by n-grams if they match.

    Raises ConfigError if a number is not an integer of at least 0.
    """

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
        plan = Plan(self.k, self.nodes) if context.can.trees and self.wants_trees else Plan(self.k)
        return replace(plan, lookup=True) if context.can.lookup and self.k else plan

    def observe(self, result: RoundResult) -> None:
        """Learn nothing."""


def check_depths(**values: int) -> None:
    """Raise ConfigError, with the name, if a value is not a whole number."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"{name} must be an integer of at least 0; got {value!r}")


def check_share(name: str, value: float) -> None:
    """Raise ConfigError if `value` is not between 0 and 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigError(f"{name} must be a number from 0 to 1; got {value!r}")
