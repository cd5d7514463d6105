"""A round between its dispatch and its collection: what the device works on, and what the host reads of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

import mlx.core as mx

from eagle_mlx.cache import Saved
from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.logprobs import Logprobs
from eagle_mlx.decoding.verify import Verdict
from eagle_mlx.plan import Plan


class NaN(IntEnum):
    """Where a row's logits of a round are no numbers."""

    NOWHERE = 0
    REJECTED = 1
    """Only where a draft was rejected, or there was none."""
    KEPT = 2
    """Where a token was drawn that the row is to emit."""
    PROCESSED = 3
    """The same, and the model's own logits there are numbers: a logits processor gave NaN."""


@dataclass(frozen=True)
class RowAnswer:
    """What a round came to in one row."""

    nan: NaN
    drafted: int
    accepted: int
    tokens: list[int]
    """The accepted draft tokens and the bonus token; none where the row sat the round out."""
    path: list[int]
    """Of a tree: the numbers of the accepted draft tokens, from 0 on."""


@dataclass(frozen=True)
class Answer:
    """What the host is to know of a round, still on the device."""

    nan: mx.array
    """[B] int32, a `NaN` for each row."""
    accepted: mx.array
    """[B] int32; -1 where the row sat the round out."""
    drafted: mx.array
    """[B] int32, draft tokens of a chain or levels of a tree."""
    tokens: mx.array
    """[B, n+1] int32, of which a row emits `accepted + 1`."""
    path: mx.array | None
    """[B, n+1] int32, for trees: the nodes of those tokens, the newest token of before being node 0."""

    @classmethod
    def of(cls, logits: mx.array, draft: Draft, verdict: Verdict, spoiled: mx.array | None = None) -> Answer:
        """logits: [B, n+1, V], of all positions of a verify; spoiled: [B, n+1] bool, where processors gave NaN."""
        drafted = draft.lengths if draft.tree is None else mx.minimum(draft.lengths, draft.tree.levels)
        return cls(_nan_in(logits, verdict, spoiled), verdict.accepted, drafted, verdict.tokens, verdict.path)

    @property
    def arrays(self) -> list[mx.array]:
        fields = [self.nan, self.accepted, self.drafted, self.tokens]
        return fields if self.path is None else [*fields, self.path]

    @property
    def width(self) -> int:
        """Tokens that a row can emit."""
        return self.tokens.shape[1]

    def read(self) -> list[RowAnswer]:
        """Wait for the device: nowhere else does a round do so."""
        mx.eval(self.arrays)
        nan, accepted, drafted = (cast(list[int], x.tolist()) for x in (self.nan, self.accepted, self.drafted))
        tokens = cast(list[list[int]], self.tokens.tolist())
        paths = cast(list[list[int]], self.path.tolist()) if self.path is not None else [[]] * len(tokens)
        return [_row_answer(*row) for row in zip(nan, accepted, drafted, tokens, paths, strict=True)]


@dataclass(frozen=True)
class Checkpoint:
    """What a round changes on the device, as it was before."""

    cache: Saved
    newest: mx.array
    counts: mx.array | None
    """Of the processors."""


@dataclass(frozen=True)
class Round:
    """A round that has been dispatched."""

    plan: Plan
    answer: Answer
    logprobs: Logprobs | None
    aux: tuple[mx.array, ...]
    """The proposer's aux layers at the positions of the answer's tokens, each [B, n+1, H]."""
    before: Checkpoint
    draft: Draft | None = None
    """The draft, if rows of the rejection rule may have to judge a part of it later."""
    draft_seconds: float | None = None
    """What drafting took, where that was measured."""
    confidences: Sequence[Sequence[float]] = ()
    """As of the draft."""


def _row_answer(nan: int, accepted: int, drafted: int, tokens: list[int], path: list[int]) -> RowAnswer:
    if accepted < 0:
        return RowAnswer(NaN(nan), 0, 0, [], [])
    return RowAnswer(NaN(nan), drafted, accepted, tokens[: accepted + 1], [node - 1 for node in path[1 : accepted + 1]])


def _nan_in(logits: mx.array, verdict: Verdict, spoiled: mx.array | None) -> mx.array:
    """[B] int32, a `NaN` for each row. logits: [B, n+1, V]; spoiled: [B, n+1] bool, never of a tree."""
    nan = mx.any(mx.isnan(logits), axis=-1) if verdict.nan is None else verdict.nan
    said = nan if verdict.path is None else mx.take_along_axis(nan, verdict.path, axis=1)
    emitted = mx.arange(said.shape[1]) <= verdict.accepted[:, None]
    found = mx.any(nan, axis=1).astype(mx.int32) + mx.any(said & emitted, axis=1).astype(mx.int32)
    if spoiled is None:
        return found
    return mx.where((found < NaN.KEPT) & mx.any(spoiled & emitted, axis=1), int(NaN.PROCESSED), found)
