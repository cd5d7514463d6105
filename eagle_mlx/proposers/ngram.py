"""Draft with n-grams, which propose what followed the last tokens earlier in the same text; alone or with a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from eagle_mlx.cache.lengths import swap_removed
from eagle_mlx.cache.ragged import CacheSize, RaggedCache
from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.errors import ConfigError
from eagle_mlx.plan import Plan, Trial
from eagle_mlx.proposers.base import Observation, Proposer, ProposerState, StatePiece
from eagle_mlx.sampling_params import Drafter
from eagle_mlx.target import Target

_REACH = 16  # the most tokens that a trial compares: the default policy's longest draft of n-grams
MIN_NGRAM, MAX_NGRAM = 3, 4
"""n-gram lengths in addition to a model. A minimum of 2 was slower for SmolLM2-135M with a head (docs/decisions.md)."""


@dataclass
class NgramIndex:
    """One row's text, where each n-gram ended, and how well n-grams would have predicted the text.

    Each match begins a trial, whether n-grams draft or not. Adding and finding a token is constant work. A text is only
    kept until something asks for a match or a trial, so that rows that never do cost no more.
    """

    max_ngram: int
    min_ngram: int
    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)  # the latest end of each n-gram
    _match: int = 0
    _kept: list[Sequence[int]] = field(default_factory=list)  # added, but not yet in `tokens`
    _open: list[tuple[int, int]] = field(default_factory=list)  # trials: the text's length at the start, and the match
    _ended: list[Trial] = field(default_factory=list)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add a prompt, or the tokens of a round."""
        if tokens:
            self._kept.append(tokens)

    @property
    def match(self) -> int:
        """The index of the token that followed the latest match of the text's last tokens; 0 without a match."""
        kept, self._kept = self._kept, []
        for tokens in kept:
            self._index(tokens)
        return self._match

    def _index(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            # An n-gram is added when the next token arrives, so that a lookup never finds itself.
            for n in range(self.min_ngram, min(self.max_ngram, len(self.tokens)) + 1):
                self.ends[tuple(self.tokens[-n:])] = len(self.tokens)
            self.tokens.append(token)
        self._open = [trial for trial in self._open if not self._ends(*trial)]
        lengths = range(min(self.max_ngram, len(self.tokens)), self.min_ngram - 1, -1)
        self._match = next((end for n in lengths if (end := self.ends.get(tuple(self.tokens[-n:])))), 0)
        if self._match:
            self._open.append((len(self.tokens), self._match))

    def lookup(self, count: int) -> list[int]:
        """Return up to `count` tokens that followed the match; empty without one."""
        return self.tokens[match : match + count] if (match := self.match) else []

    def ended(self) -> list[Trial]:
        """Return the trials that ended since the last call."""
        _ = self.match
        ended, self._ended = self._ended, []
        return ended

    def _ends(self, start: int, match: int) -> bool:
        """Return whether a trial is over: a token was wrong, or none is left to compare."""
        draft = self.tokens[match : min(match + _REACH, start)]
        text = self.tokens[start : start + len(draft)]
        right = next((at for at, token in enumerate(text) if draft[at] != token), len(text))
        if right == len(text) < len(draft):
            return False
        self._ended.append(Trial(min(right + 1, len(draft)), right))
        return True


class NgramProposer(Proposer):
    """Drafts by looking up the last tokens in the row's own text, longest n-gram first. It needs no model."""

    name = "ngram"
    movable = True

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1, prompt_lookup: bool = True):
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigError(f"min_ngram {min_ngram} and max_ngram {max_ngram} must satisfy 1 <= min <= max")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self.prompt_lookup = prompt_lookup

    def open(self, prompts: Sequence[Sequence[int]]) -> NgramState:
        rows = [NgramIndex(self.max_ngram, self.min_ngram) for _ in prompts]
        for row, prompt in zip(rows, prompts, strict=True):
            row.extend(prompt if self.prompt_lookup else prompt[-1:])
        return NgramState(rows)


class NgramState(ProposerState):
    def __init__(self, rows: list[NgramIndex]):
        self.rows = rows

    def draft(self, plan: Plan, sampling: SamplingBatch, positions: mx.array) -> Draft:
        drafts = [row.lookup(plan.depth) for row in self.rows]
        width = max(map(len, drafts))  # the target need not read more
        padded = mx.array([tokens + [0] * (width - len(tokens)) for tokens in drafts], mx.int32)
        return Draft(padded.reshape(len(drafts), width), mx.array([len(tokens) for tokens in drafts], mx.int32))

    def trials(self, drafters: Sequence[Drafter | None]) -> list[Trial]:
        rows = zip(self.rows, drafters, strict=True)
        return [trial for row, drafter in rows if drafter in (None, "ngrams") for trial in row.ended()]

    def observe(self, seen: Observation) -> None:
        for row, tokens in zip(self.rows, seen.tokens, strict=True):
            row.extend(tokens)

    def append(self, other: NgramState) -> None:
        self.rows.extend(other.rows)

    def remove(self, row: int) -> None:
        self.rows = swap_removed(self.rows, row)

    def take(self, row: int) -> NgramState:
        taken = NgramState([self.rows[row]])
        self.remove(row)
        return taken


class HybridProposer(Proposer):
    """Drafts with a model, or with n-grams where the text repeats itself, as the plan says for each round.

    N-grams are available only if they match in at least half of the rows. The policy chooses by measured throughput
    (`ThroughputPolicy`). A request may exclude one of them (`SamplingParams.drafter`).
    """

    def __init__(self, model: Proposer, ngrams: NgramProposer | None = None):
        self.model, self.ngrams = model, ngrams or NgramProposer(MAX_NGRAM, MIN_NGRAM)
        self.name, self.abilities = model.name, model.abilities
        self.movable, self.is_positional = model.movable, model.is_positional
        self.head = model.head

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
        pairs = zip(self.ngrams.rows, drafters, strict=True)
        matches = [drafter != "model" and row.match > 0 for row, drafter in pairs if drafter != "none"]
        return 0 < len(matches) <= 2 * sum(matches)

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
