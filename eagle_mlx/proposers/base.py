"""What every way to draft has in common: the protocol between a proposer and the engine.

A proposer is shared by all batches; what it knows of a batch's rows lives in a state that it opens for them. Per round
the engine calls `draft`, verifies, and calls `observe` with what the rows have become. A third party's proposer
needs no base class, only these methods; `ngram.py` is the shortest example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import mlx.core as mx

from eagle_mlx.cache.ragged import CacheSize
from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.plan import Abilities, Plan
from eagle_mlx.target import Target


@dataclass(frozen=True)
class Observation:
    """Positions that the target has read since the last observation, the same for every layer of interest."""

    tokens: Sequence[Sequence[int]]
    """Row by row, the token that follows each of those positions; none in a row that sat the round out, because its
    grammar's masks were late."""
    aux: tuple[mx.array, ...]
    """The proposer's aux layers at those positions, each [B, L, H], right-padded."""


class ProposerState(Protocol):
    def prefill(self, seen: Observation) -> None:
        """The target has read a chunk of the prompts that the state was opened with; without aux layers it has none."""

    def draft(self, plan: Plan, sampling: SamplingBatch, positions: mx.array) -> Draft:
        """Draft what the plan asks for behind each row, or the nearest less that this proposer can; depth is >= 1.

        Where `plan.stop_below` is given, a chain ends when the mean confidence of the rows falls below it, by the
        proposer's own reckoning of the token `CONFIDENCE_LAG` before the newest. What has been drafted by then is kept:
        to keep or drop a token for what it is would change what is emitted where tokens are drawn.

        `positions` [B] int32: the index in its sequence of each row's first draft token, which keys the noise.
        """

    def observe(self, seen: Observation) -> None:
        """Take note of what the target has read and of the tokens that follow."""

    def append(self, other: ProposerState) -> None:
        """The other state's rows join behind this one's."""

    def remove(self, row: int) -> None:
        """A row leaves; the last one takes its place."""


class StatePiece(Protocol):
    """What a state keeps of some positions of a row's text, one behind the other."""

    @property
    def arrays(self) -> list[mx.array]:
        """All of it that is on the device."""
        ...

    def split(self, at: int) -> tuple[Self, Self]:
        """The first `at` positions and the others; this one is given away."""
        ...


@runtime_checkable
class Separable(Protocol):
    """What a state that reads the target's hidden states must have for the prefix cache to keep its pasts."""

    def length(self, row: int) -> int:
        """Positions of the row's text that it has read."""
        ...

    def piece(self, row: int, start: int, end: int) -> StatePiece:
        """What it keeps of the positions `start` to `end` of a row's text, in arrays of its own."""
        ...


@runtime_checkable
class CanJoin(Protocol):
    """What the proposer of such states must have."""

    def join(self, pieces: Sequence[StatePiece], length: int, prompt: Sequence[int] = ()) -> ProposerState:
        """A state of one row that has read the first `length` positions of a text, which is to be this prompt's.

        The pieces begin with it, and hold at least these positions. Who takes the row over reads at least one more.
        """
        ...


@runtime_checkable
class Movable(Protocol):
    """What a state must have for its rows to be decoded in two groups: the others then stay in one."""

    def take(self, row: int) -> ProposerState:
        """A row leaves, as with `remove`, which is not the only one; a state that knows what this one knew of it."""
        ...


@runtime_checkable
class CanLookUp(Protocol):
    """What a state has whose rows may be drafted by n-grams or by a model, as the plan says."""

    @property
    def can_look_up(self) -> bool:
        """Whether n-grams know how most of the rows' texts go on."""
        ...


@runtime_checkable
class HasWeights(Protocol):
    """What a proposer that is a model may have, so that its weights count where reading them twice is weighed."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights of its own. It is bound."""
        ...


@runtime_checkable
class HasCacheSize(Protocol):
    """What a proposer with caches of its own may have, so that they are counted with the target's."""

    def cache_size(self) -> CacheSize:
        """What they take. It is bound."""
        ...


class Proposer(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers, counted from 0, whose outputs `observe` needs."""

    @property
    def abilities(self) -> Abilities:
        """What its drafts can be beside chains of a depth that is known before."""

    def bind(self, target: Target) -> None:
        """Called once, when the engine is built. Raises an EagleError where the target does not fit."""

    def open(self, prompts: Sequence[Sequence[int]]) -> ProposerState:
        """A state for new rows, of which the target has read nothing yet."""
