"""The protocol between a policy and the engine, what it may ask for, and the simplest policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from eagle_mlx.errors import ConfigError

Enough = Callable[[Sequence[float]], bool]
"""Whether a chain is long enough; told, for each row, how likely it stands down to the token `BEHIND` the newest."""
BEHIND = 2
"""Draft tokens that are under way when the host asks, so that the device does not wait for the answer: they take about
the time in which the host builds the verify.
"""
FLANK = 2
"""Tokens beside one of an elastic chain, at most."""
Beside = Callable[[int, Sequence[Sequence[float]]], int]
"""How many tokens to draft beside a chain that has ended, told its length and all that `Enough` was told of it."""


@dataclass(frozen=True)
class Limits:
    """How far the elastic drafts of one round go."""

    enough: Enough
    beside: Beside | None = None
    """None where only chains can be judged."""


@dataclass(frozen=True)
class Outcome:
    """What became of a round of elastic drafts."""

    chances: Sequence[Sequence[float]]
    """What `Enough` was told of each row, every time that it was asked."""
    drafted: Sequence[int]
    """Row by row, the tokens of the chain."""
    accepted: Sequence[int]
    """Those of them that were kept."""
    beside: int = 0
    """Tokens beside each chain."""
    aside: Sequence[int | None] = ()
    """Row by row, which of these was kept behind the chain's, by its number from 0 on, the likeliest first."""

    @property
    def depth(self) -> int:
        return max(self.drafted)

    @property
    def kept(self) -> list[int]:
        """Row by row, all draft tokens that were kept."""
        aside = self.aside or [None] * len(self.accepted)
        return [count + (number is not None) for count, number in zip(self.accepted, aside, strict=True)]


@dataclass(frozen=True)
class Shape:
    """What to draft for each row: a chain of `depth` tokens, or a tree of more than that, at most so deep."""

    depth: int
    nodes: int
    elastic: bool = False
    """Whether a chain ends sooner where the policy says, while it is drafted, that it is long enough. What stands
    beside it then is not counted in `nodes`."""

    @classmethod
    def chain(cls, depth: int) -> Shape:
        return cls(depth, depth)

    @property
    def is_tree(self) -> bool:
        return self.nodes > self.depth

    def cut(self, most: int) -> Shape:
        """The same where no row has a use for more than `most` tokens below one another."""
        nodes = self.nodes if self.is_tree and most else min(self.nodes, most)
        return Shape(min(self.depth, most), nodes, self.elastic and most > 0)


class Policy(Protocol):
    """Asked before each round, told after it. One that learns serves one engine with one proposer."""

    def depth(self, rows: int) -> int:
        """Tokens to draft for each of `rows` rows in the next round; 0 decodes plainly.

        Asking changes nothing: while a plain round is under way the engine asks about the one after it, and starts
        that too if it is to be plain.
        """
        ...

    def observe(self, depth: int, drafted: Sequence[int], accepted: Sequence[int], seconds: float) -> None:
        """A round has ended in which up to `depth` tokens were asked for each row.

        drafted, accepted: row by row, the tokens that the proposer gave and those of them that the verify kept;
        seconds: what the round took from the end of the one before it, drafting and the host's work between the two
        included, reading prompts not.
        """
        ...


@runtime_checkable
class ShapePolicy(Policy, Protocol):
    """A policy that may ask for more than chains of a depth that is known before."""

    @property
    def wants_trees(self) -> bool: ...

    def shape(self, rows: int, trees: bool, elastic: bool = False) -> Shape:
        """As `depth`; a tree, or an elastic chain, only where they can be had."""
        ...

    def observe_tree(self, shape: Shape, kept: Sequence[Sequence[int]], seconds: float) -> None:
        """As `observe`, of a round with trees. kept: row by row, the draft tokens that were kept, by their numbers from
        0 on, the likeliest first.
        """
        ...


@runtime_checkable
class ElasticPolicy(ShapePolicy, Protocol):
    """A policy that may ask for elastic chains, and for tokens beside them."""

    def limits(self, rows: int, trees: bool) -> Limits:
        """For one round; with tokens beside the chain only where trees can be had."""
        ...

    def observe_elastic(self, outcome: Outcome, seconds: float) -> None:
        """As `observe`, of a round of elastic drafts."""
        ...


@dataclass(frozen=True)
class FixedPolicy:
    """Always k draft tokens. Raises ConfigError where k is not a whole number of at least 0."""

    k: int
    nodes: int = 0
    """Where it is more than k: tokens of a tree that is at most k deep, in place of a chain."""

    def __post_init__(self) -> None:
        check_depth("k", self.k)
        check_depth("nodes", self.nodes)

    def depth(self, rows: int) -> int:
        return self.k

    @property
    def wants_trees(self) -> bool:
        return self.nodes > self.k > 0

    def shape(self, rows: int, trees: bool, elastic: bool = False) -> Shape:
        return Shape(self.k, self.nodes) if trees and self.wants_trees else Shape.chain(self.k)

    def observe(self, depth: int, drafted: Sequence[int], accepted: Sequence[int], seconds: float) -> None:
        """Nothing to learn."""

    def observe_tree(self, shape: Shape, kept: Sequence[Sequence[int]], seconds: float) -> None:
        """Nothing to learn."""


def check_depth(name: str, value: int) -> None:
    """Raise ConfigError where `value` is no number of draft tokens."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{name}, the number of draft tokens, must be an integer of at least 0; got {value!r}")


def check_share(name: str, value: float) -> None:
    """Raise ConfigError where `value` is not between 0 and 1."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigError(f"{name} must be a number from 0 to 1; got {value!r}")
