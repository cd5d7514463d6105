"""N-gram drafting: propose what followed the last tokens earlier in the same text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from eagle_mlx.cache.lengths import swap_removed
from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.errors import ConfigError
from eagle_mlx.plan import Plan, Trial
from eagle_mlx.proposers.base import Observation, Proposer, ProposerState
from eagle_mlx.sampling_params import Drafter

_REACH = 16
"""The most tokens that a trial compares: the default policy's longest draft of n-grams."""


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
        known = self.tokens[start : start + len(draft)]
        right = next((at for at, token in enumerate(known) if draft[at] != token), len(known))
        if right == len(known) < len(draft):
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
        self.max_ngram, self.min_ngram, self.prompt_lookup = max_ngram, min_ngram, prompt_lookup

    def open(self, prompts: Sequence[Sequence[int]]) -> NgramState:
        rows = [NgramIndex(self.max_ngram, self.min_ngram) for _ in prompts]
        for row, prompt in zip(rows, prompts, strict=True):
            row.extend(prompt if self.prompt_lookup else prompt[-1:])
        return NgramState(rows)


class NgramState(ProposerState):
    def __init__(self, rows: list[NgramIndex]):
        self.rows = rows

    def draft(self, plan: Plan, sampling: SamplingBatch, positions: mx.array) -> Draft:
        found = [row.lookup(plan.depth) for row in self.rows]
        width = max(map(len, found))  # the target need not read more
        padded = mx.array([tokens + [0] * (width - len(tokens)) for tokens in found], mx.int32)
        return Draft(padded.reshape(len(found), width), mx.array([len(tokens) for tokens in found], mx.int32))

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
