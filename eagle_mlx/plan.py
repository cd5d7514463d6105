"""What a round is to draft and what it came to: two values of plain numbers, which can be logged, replayed and sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

CONFIDENCE_LAG = 2
"""An early exit looks at the confidence of the token so many before the newest: the device drafts those meanwhile, so
that it does not wait for the host."""


@dataclass(frozen=True)
class Plan:
    """What the next round drafts for each row: nothing, a chain, or a tree."""

    depth: int
    """Tokens of a chain, or levels of a tree; 0 decodes plainly."""
    nodes: int = 0
    """Tokens of a tree; a chain where they are not more than `depth`."""
    stop_below: float | None = None
    """A chain ends early where its confidence falls below this; None drafts all of it."""
    lookup: bool | None = None
    """Where n-grams know how the text goes on beside a model: whether they draft. None where there is no choice."""
    baseline: float | None = field(default=None, compare=False)
    """Of an exploration: the tokens per second and row that the best plan is expected to give."""

    @property
    def is_tree(self) -> bool:
        return self.nodes > self.depth > 0

    @property
    def size(self) -> int:
        """Draft tokens that the target reads."""
        return self.nodes if self.is_tree else self.depth

    def cut(self, most: int) -> Plan:
        """The same where no row has a use for more than `most` tokens below one another."""
        if most >= self.depth:
            return self
        return replace(self, depth=most, nodes=self.nodes if self.is_tree else 0) if most > 0 else PLAIN


PLAIN = Plan(0)
"""A round in which nothing is drafted."""


@dataclass(frozen=True)
class Abilities:
    """What proposer and rows allow in the next round."""

    trees: bool = False
    early_exit: bool = False
    lookup: bool = False
    """N-grams know how most of the rows' texts go on, and could draft in place of a model."""


@dataclass(frozen=True)
class Context:
    """What a policy is told before a round."""

    rows: int
    can: Abilities = Abilities()
    group: int = 0
    """The number of the group of rows that the round is for."""


@dataclass(frozen=True)
class RoundResult:
    """What a round came to, row by row."""

    plan: Plan
    """What was drafted by, cut to what the rows had a use for."""
    drafted: Sequence[int]
    """Draft tokens of a chain, levels of a tree."""
    accepted: Sequence[int]
    """Draft tokens that the verify kept."""
    taken: Sequence[int]
    """Tokens that the row took, the bonus token included: fewer than the verify gave where the row ended."""
    seconds: float
    """From the end of what came before it; drafting and the host's work are part of it, prompts are not."""
    draft_seconds: float | None = None
    """What drafting took of it, by the share that it had when that was last measured."""
    paths: Sequence[Sequence[int]] = ()
    """Of trees: the numbers, from 0 on and the likeliest first, of the draft tokens that were kept."""
    confidences: Sequence[Sequence[float]] = ()
    """Of early exits: for each time that the proposer looked, the confidence of every row. The i-th look decides
    whether the draft token number i + 1 + CONFIDENCE_LAG, from 0 on, is drafted."""
    group: int = 0
    """The number of the group of rows that decoded."""

    @property
    def rows(self) -> int:
        return len(self.accepted)

    @property
    def kept(self) -> list[int]:
        """Draft tokens that were accepted and emitted."""
        return [min(accepted, taken) for accepted, taken in zip(self.accepted, self.taken, strict=True)]

    @property
    def emitted(self) -> int:
        """Tokens of all rows."""
        return sum(self.taken)

    @property
    def depth(self) -> int:
        """Tokens of the longest draft."""
        return max(self.drafted, default=0)
