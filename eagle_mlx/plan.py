"""The sizes of prompts' chunks, the plan of a round, and its result: plain numbers to be logged, replayed and sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

CONFIDENCE_LAG = 2
"""An early exit uses the confidence of the token this many steps before the newest. The device drafts meanwhile."""
PREFILL_CHUNK = 2048
"""Prompt positions per forward, over all rows: mlx-lm's `prefill_step_size` (0.32, `generate_step`)."""
PREFILL_MS = 400
"""Milliseconds that a chunk may take while others decode. With a round, that is less than the one second after which
a reader loses the train of thought (Nielsen 1993, Usability Engineering, chapter 5)."""
LEAST_CHUNK = 128
"""Minimum positions of a chunk. With fewer, reading the weights would cost too much per position."""


@dataclass(frozen=True)
class Plan:
    """The draft of each row in the next round: nothing, a chain or tree by a model, or a chain of its own source."""

    depth: int  # tokens of a model's chain, or levels of its tree; 0 if no model drafts
    nodes: int = 0  # tokens of a tree; a chain if not more than `depth`
    stop_below: float | None = None  # end a chain early when its confidence falls below this; None drafts all of it
    lookups: tuple[int, ...] = ()
    """For each row, the tokens of a chain from its source, which drafts instead of a model; 0: not from it. Empty if no
    row drafts from one."""
    baseline: float | None = field(default=None, compare=False)
    """For an exploration, the tokens per second and row expected of the best plan."""
    sources: tuple[int, ...] = field(default=(), compare=False)  # `Context.sources`, if the policy learns from them

    @cached_property
    def is_tree(self) -> bool:
        return self.nodes > self.depth > 0

    @cached_property
    def size(self) -> int:
        """Number of draft tokens that the target reads."""
        return self.nodes if self.is_tree else max(self.depth, *self.lookups, 0)

    def cut(self, most: int) -> Plan:
        """Return the plan limited to a depth of `most`."""
        if most >= max(self.depth, *self.lookups, 0):
            return self
        nodes, lookups = self.nodes if self.is_tree else 0, tuple(min(count, most) for count in self.lookups)
        return replace(self, depth=min(self.depth, most), nodes=nodes, lookups=lookups) if most > 0 else PLAIN

    def within(self, can: Abilities, sources: Sequence[int] = ()) -> Plan:
        """Return the nearest plan that is possible: a chain instead of a tree, to its full depth, by the model, or only
        in rows with a source if there is no model. `sources`: as in `Context`."""
        wanted = self.lookups if can.model or any(self.lookups) else [self.depth] * len(sources)
        lookups = tuple(count * (source != 0) for count, source in zip(wanted, sources, strict=False))
        alone = not any(lookups)
        model = can.model and (alone or not all(lookups))
        return replace(
            self,
            depth=self.depth if model else 0,
            nodes=self.nodes if self.is_tree and can.trees and model and alone else 0,
            stop_below=self.stop_below if can.early_exit and model else None,
            lookups=() if alone else lookups,
        )


PLAIN = Plan(0)  # a round without drafting
MATCH = -1  # see `Context.sources`
FORCED = 16
"""The most tokens to ask a grammar for: each costs a mask, and few schemas have longer keys."""


@dataclass(frozen=True)
class Abilities:
    """Abilities of the proposer and the rows in the next round."""

    trees: bool = False
    early_exit: bool = False
    model: bool = True  # whether a model can draft
    may_pad: bool = True  # whether it can read prompts of different lengths together


@dataclass(frozen=True)
class Context:
    """A policy's input before a round."""

    rows: int
    can: Abilities = Abilities()
    group: int = 0  # index of the round's group of rows
    elsewhere: int = 0
    """Rows that decode in other groups. They do not change the cost of this round, but the load of the engine."""
    sources: tuple[int, ...] = ()
    """For each row, what it could draft without a model: how many right tokens its grammar promises, else `MATCH` times
    the tokens of an n-gram that matches, else 0. Empty if no row could."""


class Trial(NamedTuple):
    """A draft that n-grams could have made at the start of a round, compared with the text that followed."""

    drafted: int  # the number of tokens compared: all, or up to and including the first wrong one
    accepted: int  # the number of tokens before the first wrong one
    match: int = 1  # the tokens of the n-gram


@dataclass(frozen=True)
class RoundResult:
    """The result of a round, by row."""

    plan: Plan  # the plan, cut to what the rows could use
    drafted: Sequence[int]  # draft tokens of a chain, or levels of a tree
    accepted: Sequence[int]  # draft tokens that the verify accepted
    taken: Sequence[int]
    """Tokens added to the row, including the bonus token. Fewer than the verify gave if the row ended."""
    seconds: float  # time since the end of the previous work; includes drafting and the host's work, not prefill
    draft_seconds: float | None = None  # time spent drafting, estimated from its last measured share
    paths: Sequence[Sequence[int]] = ()
    """For trees, the indices of accepted draft tokens, where 0 is the most likely token."""
    confidences: Sequence[Sequence[float]] = ()
    """For early exits, each row's confidence at each check. Check i decides on draft token i + 1 + CONFIDENCE_LAG."""
    group: int = 0  # index of the group of rows
    trials: Sequence[Trial] = ()  # trials of n-grams that this round's tokens completed
    forced: Sequence[bool] = ()  # whether each row drafted by its grammar, guesses included; empty if none did

    @property
    def rows(self) -> int:
        return len(self.accepted)

    @property
    def kept(self) -> list[int]:
        """Draft tokens that were accepted and emitted."""
        return [min(accepted, taken) for accepted, taken in zip(self.accepted, self.taken, strict=True)]

    @property
    def drafted_freely(self) -> list[int]:
        """Draft tokens that no grammar forced."""
        return [count * (not forced) for count, forced in zip_longest(self.drafted, self.forced)]

    @property
    def emitted(self) -> int:
        """Tokens of all rows."""
        return sum(self.taken)

    @property
    def depth(self) -> int:
        """Tokens of the longest draft."""
        return max(self.drafted, default=0)
