"""N-gram drafting: propose what followed the last tokens earlier in the same text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import mlx.core as mx

from eagle_mlx.cache.lengths import swap_removed
from eagle_mlx.decoding.draft import Draft, Tree
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.errors import ConfigError
from eagle_mlx.plan import Abilities, Plan
from eagle_mlx.proposers.base import Observation, ProposerState
from eagle_mlx.target import Target

_MAX_MATCHES = 4
"""Number of latest matches per n-gram length in a tree."""
_MAX_BRANCHES = 8
"""Maximum number of matches in a tree."""
_NEXT_BRANCH, _NEXT_TOKEN = 0.5, 0.8
"""Weight of a branch relative to the previous one, and of a token relative to its parent."""


@dataclass
class NgramIndex:
    """One row's text and where each n-gram ended, latest first. Adding and finding a token is constant work."""

    max_ngram: int
    min_ngram: int
    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)  # the latest end of each n-gram
    earlier: list[list[int]] = field(default_factory=list)
    """For each length from `min_ngram` on, the previous end of the n-gram that ends at each position; 0 for none."""

    def __post_init__(self) -> None:
        self.earlier = [[] for _ in range(self.min_ngram, self.max_ngram + 1)]

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            # An n-gram is added when the next token arrives, so that a lookup never finds itself.
            place = len(self.tokens)
            for n, earlier in enumerate(self.earlier, self.min_ngram):
                last = 0
                if n <= place:
                    gram = tuple(self.tokens[-n:])
                    last = self.ends.get(gram, 0)
                    self.ends[gram] = place
                earlier.append(last)
            self.tokens.append(token)

    def lookup(self, count: int) -> list[int]:
        """Return up to `count` tokens after the latest of the longest matches; empty without a match."""
        return next(self.matches(count), [])

    def matches(self, count: int) -> Iterator[list[int]]:
        """Yield up to `count` tokens after each match: longest n-grams first; for each length, latest match first."""
        for n in range(min(self.max_ngram, len(self.tokens)), self.min_ngram - 1, -1):
            end, seen = self.ends.get(tuple(self.tokens[-n:]), 0), 0
            while end and seen < _MAX_MATCHES:
                yield self.tokens[end : end + count]
                end, seen = self.earlier[n - self.min_ngram][end], seen + 1


class NgramProposer:
    """Drafts by looking up the last tokens in the row's own text, longest n-gram first. It needs no model."""

    name = "ngram"
    aux_layers: tuple[int, ...] = ()
    abilities = Abilities(trees=True)

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1, prompt_lookup: bool = True):
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigError(f"min_ngram {min_ngram} and max_ngram {max_ngram} must satisfy 1 <= min <= max")
        self.max_ngram, self.min_ngram, self.prompt_lookup = max_ngram, min_ngram, prompt_lookup

    def bind(self, target: Target) -> None:
        """Accept any target."""

    def open(self, prompts: Sequence[Sequence[int]]) -> NgramState:
        rows = [NgramIndex(self.max_ngram, self.min_ngram) for _ in prompts]
        for row, prompt in zip(rows, prompts, strict=True):
            row.extend(prompt if self.prompt_lookup else prompt[-1:])
        return NgramState(rows)


def merge_branches(branches: Iterable[Sequence[int]], nodes: int) -> tuple[list[int], list[int]]:
    """Merge branches into a tree of at most `nodes` nodes; return their tokens and their parents' numbers.

    The weight of a node falls with its depth and with the index of its first branch. Nodes are sorted by weight, so
    parents come before children. Numbers start at 1; 0 is the text.
    """
    worth: dict[tuple[int, ...], float] = {}
    for place, branch in enumerate(branches):
        for length in range(1, len(branch) + 1):
            worth.setdefault(tuple(branch[:length]), _NEXT_BRANCH**place * _NEXT_TOKEN**length)
    chosen = sorted(worth, key=lambda node: -worth[node])[:nodes]
    numbers: dict[tuple[int, ...], int] = {(): 0} | {node: number for number, node in enumerate(chosen, 1)}
    return [node[-1] for node in chosen], [numbers[node[:-1]] for node in chosen]


class NgramState:
    def __init__(self, rows: list[NgramIndex]):
        self.rows = rows

    def draft(self, plan: Plan, sampling: SamplingBatch, positions: mx.array) -> Draft:
        return self._tree(plan) if plan.is_tree else self._chain(plan.depth)

    def _chain(self, depth: int) -> Draft:
        found = [row.lookup(depth) for row in self.rows]
        width = max(map(len, found))  # the target need not read more
        padded = mx.array([tokens + [0] * (width - len(tokens)) for tokens in found], mx.int32)
        return Draft(padded.reshape(len(found), width), mx.array([len(tokens) for tokens in found], mx.int32))

    def _tree(self, plan: Plan) -> Draft:
        grown = [merge_branches(islice(row.matches(plan.depth), _MAX_BRANCHES), plan.nodes) for row in self.rows]
        width = max(len(tokens) for tokens, _ in grown)
        if not width:
            return self._chain(plan.depth)
        tokens, parents = (
            mx.array([tree[part] + [0] * (width - len(tree[part])) for tree in grown], mx.int32) for part in (0, 1)
        )
        lengths = mx.array([len(tokens) for tokens, _ in grown], mx.int32)
        return Draft(tokens, lengths, tree=Tree(parents, plan.depth))

    def prefill(self, seen: Observation) -> None:
        """Do nothing: the prompts were indexed when the state was opened."""

    def observe(self, seen: Observation) -> None:
        for row, tokens in zip(self.rows, seen.tokens, strict=True):
            row.extend(tokens)

    def append(self, other: ProposerState) -> None:
        assert isinstance(other, NgramState)
        self.rows.extend(other.rows)

    def remove(self, row: int) -> None:
        self.rows = swap_removed(self.rows, row)

    def take(self, row: int) -> NgramState:
        taken = NgramState([self.rows[row]])
        self.remove(row)
        return taken
