"""Draft with n-grams where the text repeats itself, and with a head or a draft model elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from eagle_mlx.cache.ragged import CacheSize, RaggedCache
from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.plan import Plan, Trial
from eagle_mlx.proposers.base import Observation, Proposer, ProposerState, StatePiece
from eagle_mlx.proposers.ngram import NgramProposer, NgramState
from eagle_mlx.sampling_params import Drafter
from eagle_mlx.target import Target

MIN_NGRAM, MAX_NGRAM = 3, 4
"""n-gram lengths in addition to a model. A minimum of 2 was slower for SmolLM2-135M with a head (docs/decisions.md)."""


class HybridProposer(Proposer):
    """Drafts with a model or with n-grams, as the plan says for each round.

    N-grams are available only if they match in at least half of the rows. The policy chooses by measured throughput
    (`ThroughputPolicy`). A request may exclude one of them (`SamplingParams.drafter`).
    """

    def __init__(self, model: Proposer, ngrams: NgramProposer | None = None):
        self.model, self.ngrams = model, ngrams or NgramProposer(MAX_NGRAM, MIN_NGRAM)
        self.name, self.abilities = model.name, model.abilities
        self.movable, self.is_positional, self.head = model.movable, model.is_positional, model.head

    @property
    def aux_layers(self) -> tuple[int, ...]:  # type: ignore[override]  # a model's may depend on the target
        return self.model.aux_layers

    def bind(self, target: Target) -> None:
        self.model.bind(target)
        self.head = self.model.head

    def cache_size(self) -> CacheSize:
        return self.model.cache_size()

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    @property
    def nbytes(self) -> int:
        return self.model.nbytes

    def open(self, prompts: Sequence[Sequence[int]]) -> HybridState:
        return HybridState(self.model.open(prompts), self.ngrams.open(prompts))

    def join(self, pieces: Sequence[StatePiece], length: int, prompt: Sequence[int] = ()) -> HybridState:
        return HybridState(self.model.join(pieces, length), self.ngrams.open([prompt]))


class HybridState(ProposerState):
    """The model's state, and the rows' texts."""

    def __init__(self, model: ProposerState, ngrams: NgramState):
        self.model, self.ngrams = model, ngrams

    def can_look_up(self, drafters: Sequence[Drafter | None]) -> bool:
        """Return whether n-grams match, and may draft, in at least half of the rows that want drafts."""
        rows = [(row, each) for row, each in zip(self.ngrams.rows, drafters, strict=True) if each != "none"]
        return 0 < len(rows) <= 2 * sum(each != "model" and row.match > 0 for row, each in rows)

    def trials(self, drafters: Sequence[Drafter | None]) -> list[Trial]:
        return self.ngrams.trials(drafters)

    def may_draft(self, drafter: Drafter | None, lookup: bool | None) -> bool:
        return drafter not in ("none", "model" if lookup else "ngrams")

    def draft(self, plan: Plan, sampling: SamplingBatch, positions: mx.array) -> Draft:
        return (self.ngrams if plan.lookup else self.model).draft(plan, sampling, positions)

    def prefill(self, seen: Observation) -> None:
        self.model.prefill(seen)

    def observe(self, seen: Observation) -> None:
        self.model.observe(seen)
        self.ngrams.observe(seen)

    def append(self, other: HybridState) -> None:
        self.model.append(other.model)
        self.ngrams.append(other.ngrams)

    def remove(self, row: int) -> None:
        self.model.remove(row)
        self.ngrams.remove(row)

    def take(self, row: int) -> HybridState:
        return HybridState(self.model.take(row), self.ngrams.take(row))

    @property
    def draft_cache(self) -> RaggedCache | None:
        return self.model.draft_cache

    def resume(self, cache: RaggedCache) -> None:
        self.model.resume(cache)

    def length(self, row: int) -> int:
        return self.model.length(row)

    def piece(self, row: int, start: int, end: int) -> StatePiece:
        return self.model.piece(row, start, end)
