"""The protocol between a policy and the engine, and the simplest policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from eagle_mlx.errors import ConfigError
from eagle_mlx.plan import Context, Plan, RoundResult


class Policy(Protocol):
    """Is asked before each round and told its result. One that learns serves one engine with one proposer."""

    @property
    def wants_trees(self) -> bool:
        """Whether it ever plans trees."""
        ...

    def plan(self, context: Context) -> Plan:
        """Return what to draft in the next round.

        This changes nothing: while a plain round is under way, the engine asks about the next one, and dispatches it
        too if it is plain.
        """
        ...

    def observe(self, result: RoundResult) -> None:
        """Learn from a round that has ended. Nothing else changes a policy."""
        ...


@dataclass(frozen=True)
class FixedPolicy:
    """Always the same plan, by n-grams where they know how the text goes on.

    Raises ConfigError where a number is not a whole one of at least 0.
    """

    k: int
    """Draft tokens of each row."""
    nodes: int = 0
    """Where it is more than k: tokens of a tree that is at most k deep, in place of a chain."""

    def __post_init__(self) -> None:
        check_depth("k", self.k)
        check_depth("nodes", self.nodes)

    @property
    def wants_trees(self) -> bool:
        return self.nodes > self.k > 0

    def plan(self, context: Context) -> Plan:
        can = context.can
        plan = Plan(self.k, self.nodes) if can.trees and self.wants_trees else Plan(self.k)
        return replace(plan, lookup=True) if can.lookup and self.k else plan

    def observe(self, result: RoundResult) -> None:
        """Nothing to learn."""


def check_depth(name: str, value: int) -> None:
    """Raise ConfigError where `value` is no number of draft tokens."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{name}, the number of draft tokens, must be an integer of at least 0; got {value!r}")


def check_share(name: str, value: float) -> None:
    """Raise ConfigError where `value` is not between 0 and 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigError(f"{name} must be a number from 0 to 1; got {value!r}")
