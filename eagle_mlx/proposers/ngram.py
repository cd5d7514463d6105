"""Draft what followed the last tokens before, in the same text or in a memory of texts; alone or with a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import mlx.core as mx

from eagle_mlx.cache.lengths import swap_removed
from eagle_mlx.cache.ragged import CacheSize, RaggedCache
from eagle_mlx.decoding.draft import Draft, chains
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.errors import require
from eagle_mlx.plan import Abilities, Plan, Trial
from eagle_mlx.proposers import ProposerLike, as_proposer
from eagle_mlx.proposers.base import HeadPiece, Observation, Proposer, ProposerState
from eagle_mlx.proposers.memory import Memory
from eagle_mlx.proposers.suffixes import REACH, Texts, last_of, likeliest
from eagle_mlx.sampling_params import Drafter
from eagle_mlx.target import Target

MIN_NGRAM = 2
"""The shortest n-grams in addition to a model: replayed texts were slower with 3 (docs/decisions.md), and as fast with
1, which matches in nearly every round."""


class NgramProposer(Proposer):
    """Drafts what followed the last tokens before, after the longest match, by the most places. It needs no model.

    The place may be in the row's own text, or in texts of its namespace in a `memory`. This is suffix decoding (Oliaro
    et al. 2024, arXiv 2411.04975) over sorted texts instead of trees.
    """

    name = "ngram"
    abilities = Abilities(model=False)
    movable = True

    def __init__(
        self, max_ngram: int = REACH, min_ngram: int = 1, prompt_lookup: bool = True, memory: Memory | None = None
    ):
        """Match `min_ngram` to `max_ngram` tokens, at most 16. Raises ConfigError if they are out of order or range."""
        require("max_ngram", max_ngram, int, "an integer of at least 1", 1)
        most = min(max_ngram, REACH)
        require("min_ngram", min_ngram, int, f"from 1 to max_ngram, and at most {REACH} (no match is longer)", 1, most)
        require("memory", memory, Memory | None, "an em.Memory, or None")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self.prompt_lookup, self.memory = prompt_lookup, memory

    def open(self, prompts: Sequence[Sequence[int]]) -> NgramState:
        rows = [NgramRow(self) for _ in prompts]
        for row, prompt in zip(rows, prompts, strict=True):
            row.extend(prompt if self.prompt_lookup else prompt[-1:])
        return NgramState(rows)


class NgramRow:
    """One row's text, the latest match, and how well matches would have predicted the text.

    Each match begins a trial, whether n-grams draft or not. A text is only kept until something asks for a match or a
    trial, so that rows that never do cost no more. A round then takes tens of microseconds, whatever the text's length.
    """

    def __init__(self, proposer: NgramProposer):
        self.namespace: str | None = None
        """The namespace of the texts that may draft, besides its own; None: there are none."""
        self._proposer = proposer
        self._own = Texts()
        self.tokens = list[int]()
        self._written = set[int]()
        self._new = list[Sequence[int]]()  # not yet in the text
        self._match = list[int]()
        self._length = 0  # of the match
        self._open = list[tuple[int, int, list[int]]]()
        """Trials: the text's length at the start, the tokens that matched, and the draft."""
        self._ended = list[Trial]()

    def extend(self, tokens: Sequence[int]) -> None:
        """Add a prompt, or the tokens of a round."""
        if tokens:
            self._new.append(tokens)

    @property
    def match(self) -> list[int]:
        """The likely next tokens, at most 16; empty without a match."""
        new, self._new = self._new, []
        for tokens in new:
            self._own.add(tokens)
            self.tokens += tokens
            self._written.update(tokens)
            self._open = [trial for trial in self._open if not self._ends(*trial)]
            self._length, self._match = self._find()
            if self._match:
                self._open.append((len(self.tokens), self._length, self._match))
        return self._match

    @property
    def length(self) -> int:
        """The number of last tokens that match; 0 if nothing is drafted after them."""
        return self._length if self.match else 0

    def _find(self) -> tuple[int, list[int]]:
        """Return the length of the longest match, and its draft."""
        last = last_of(self.tokens[-self._proposer.max_ngram :])
        memory = self._proposer.memory
        others = memory.of(self.namespace) if memory is not None and self.namespace is not None else ()
        lengths = [(texts, texts.longest(last)) for texts in (self._own, *others)]
        longest = max(length for _, length in lengths)
        if longest < self._proposer.min_ngram:
            return 0, []
        matching = [texts for texts, length in lengths if length == longest]
        followers = [row for texts in matching for row in texts.followers(last[-4 * longest :])]
        return longest, likeliest(followers, self._written)

    def ended(self) -> list[Trial]:
        """Return the trials that ended since the last call."""
        _ = self.match
        ended, self._ended = self._ended, []
        return ended

    def _ends(self, start: int, match: int, draft: list[int]) -> bool:
        """Return whether a trial is over: a token was wrong, or none is left to compare."""
        text = self.tokens[start : start + len(draft)]
        right = next((at for at, token in enumerate(text) if draft[at] != token), len(text))
        if right == len(text) < len(draft):
            return False
        self._ended.append(Trial(min(right + 1, len(draft)), right, match))
        return True


class NgramState(ProposerState):
    def __init__(self, rows: list[NgramRow]):
        self.rows = rows

    def enter(self, namespaces: Sequence[str | None]) -> None:
        for row, namespace in zip(self.rows, namespaces, strict=True):
            row.namespace = namespace

    def matches(self, drafters: Sequence[Drafter | None]) -> tuple[int, ...]:
        rows = zip(self.rows, drafters, strict=True)
        matches = tuple(row.length if self.may_draft(drafter, lookup=True) else 0 for row, drafter in rows)
        return matches if any(matches) else ()

    def draft(self, plan: Plan, sampling: SamplingBatch, positions: mx.array) -> Draft:
        counts = plan.lookups or [plan.depth] * len(self.rows)
        return chains([row.match[:count] if count else [] for row, count in zip(self.rows, counts, strict=True)])

    def trials(self, drafters: Sequence[Drafter | None]) -> list[Trial]:
        rows = zip(self.rows, drafters, strict=True)
        return [trial for row, drafter in rows if self.may_draft(drafter, lookup=True) for trial in row.ended()]

    def observe(self, seen: Observation) -> None:
        for row, tokens in zip(self.rows, seen.tokens, strict=True):
            row.extend(tokens)

    def append(self, other: Self) -> None:
        self.rows.extend(other.rows)

    def remove(self, row: int) -> None:
        self.rows = swap_removed(self.rows, row)

    def take(self, row: int) -> NgramState:
        taken = NgramState([self.rows[row]])
        self.remove(row)
        return taken


class HybridProposer(Proposer):
    """Drafts with a model, and in rows whose text repeats itself with n-grams, as the plan says for each round.

    The policy chooses by measured throughput (`ThroughputPolicy`). A request may exclude one of them
    (`SamplingParams.drafter`).
    """

    def __init__(self, model: ProposerLike, ngrams: NgramProposer | None = None):
        """`model`: a head is wrapped in a HeadProposer. Raises ConfigError if it is neither a head nor a proposer."""
        model = as_proposer(model)
        require("ngrams", ngrams, NgramProposer | None, "an em.NgramProposer, or None")
        self.model, self.ngrams = model, ngrams or NgramProposer(min_ngram=MIN_NGRAM)
        self.model_drafts = True
        """You may change this between steps: without it, only n-grams draft."""
        self.name, self.abilities = model.name, model.abilities
        self.movable, self.is_positional = model.movable, model.is_positional
        self.head, self.memory = model.head, self.ngrams.memory

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
        return HybridState(self, self.model.open(prompts), self.ngrams.open(prompts).rows)

    def join(self, pieces: Sequence[HeadPiece], length: int, prompt: Sequence[int] = ()) -> HybridState:
        return HybridState(self, self.model.join(pieces, length, prompt), self.ngrams.open([prompt]).rows)


class HybridState(NgramState):
    """The model's state, and the rows' texts."""

    def __init__(self, proposer: HybridProposer, model: ProposerState, rows: list[NgramRow]):
        super().__init__(rows)
        self.proposer, self.model = proposer, model

    def may_draft(self, drafter: Drafter | None, lookup: bool) -> bool:
        return drafter not in ("none", "model" if lookup else "ngrams") and (lookup or self.proposer.model_drafts)

    def draft(self, plan: Plan, sampling: SamplingBatch, positions: mx.array) -> Draft:
        if not plan.depth:
            return super().draft(plan, sampling, positions)
        drafted = self.model.draft(plan, sampling, positions)
        if not plan.lookups:
            return drafted
        return drafted.replaced(super().draft(plan, sampling, positions), plan.lookups)

    def enter(self, namespaces: Sequence[str | None]) -> None:
        self.model.enter(namespaces)
        super().enter(namespaces)

    def prefill(self, seen: Observation) -> None:
        self.model.prefill(seen)

    def observe(self, seen: Observation) -> None:
        self.model.observe(seen)
        super().observe(seen)

    def append(self, other: Self) -> None:
        self.model.append(other.model)
        super().append(other)

    def remove(self, row: int) -> None:
        self.model.remove(row)
        super().remove(row)

    def take(self, row: int) -> HybridState:
        taken = HybridState(self.proposer, self.model.take(row), [self.rows[row]])
        super().remove(row)
        return taken

    @property
    def draft_cache(self) -> RaggedCache | None:
        return self.model.draft_cache

    def resume(self, cache: RaggedCache) -> None:
        self.model.resume(cache)

    def length(self, row: int) -> int:
        return self.model.length(row)

    def piece(self, row: int, start: int, end: int) -> HeadPiece:
        return self.model.piece(row, start, end)
