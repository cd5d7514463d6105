"""A third party's proposer and policy that use all of the protocols, or break them, at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import eagle_mlx  # noqa: F401  (brings the fast BLAS before MLX)

import mlx.core as mx  # isort: skip
import numpy as np

from eagle_mlx.decoding.draft import Draft, Tree
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.plan import CONFIDENCE_LAG, PLAIN, Abilities, Context, Plan, RoundResult
from eagle_mlx.proposers.base import HeadPiece, Observation, Proposer, ProposerState
from eagle_mlx.target import Target

DEPTHS = (1, 2, 3, 5, 8, 20)
"""The largest depth exceeds the slack of a sliding window's ring."""


class ProposerRaised(Exception):
    """Raised by a proposer at random."""


@dataclass(frozen=True)
class Manners:
    """How a proposer behaves."""

    aux_layers: tuple[int, ...] = ()
    lengths: bool = False
    """Returns lengths beyond its draft and below 0, and drafts wider than asked for."""
    ids: bool = False
    """Drafts token ids outside the vocabulary."""
    trees: bool = False
    """Returns missing or circular parents, equal siblings, and too few levels."""
    raises: float = 0.0
    """Probability that a call raises."""


@dataclass
class Sight:
    """What a proposer has observed of one row."""

    text: list[int]
    """All known tokens; the last one is the row's newest."""
    hidden: list[np.ndarray[Any, Any]] = field(default_factory=list)
    """Aux hidden states, concatenated: [H * layers] for each position read."""


@dataclass
class SightPiece:
    """Observed positions, with their tokens and the one after them."""

    text: list[int]
    hidden: list[np.ndarray[Any, Any]]
    arrays: list[mx.array] = field(default_factory=list)

    def split(self, at: int) -> tuple[SightPiece, SightPiece]:
        return (
            SightPiece(self.text[: at + 1], self.hidden[:at]),
            SightPiece(self.text[at:], self.hidden[at:]),
        )


class HostileProposer(Proposer):
    """Drafts the continuations in `known`, with random errors whose rate varies by round."""

    name = "hostile"
    abilities = Abilities(trees=True, early_exit=True)

    def __init__(self, rng: np.random.Generator, texts: list[list[int]], manners: Manners):
        """texts: whole texts, prompt and continuation; more may be added at any time."""
        self.rng, self.texts, self.manners = rng, texts, manners
        self.aux_layers = manners.aux_layers
        self.sights: list[Sight] = []
        """All rows' observations, for comparison."""
        self.vocab = self.misplaced = 0
        """Vocabulary size, and number of rounds that did not begin at the end of the text."""

    def bind(self, target: Target) -> None:
        self.vocab = target.vocab_size

    def open(self, prompts: Sequence[Sequence[int]]) -> HostileState:
        self.fail_by_chance()
        return HostileState(self, [self.sight(prompt[:1] if self.aux_layers else prompt) for prompt in prompts])

    def join(self, pieces: Sequence[HeadPiece], length: int, prompt: Sequence[int] = ()) -> HostileState:
        self.fail_by_chance()
        text, hidden = [], list[np.ndarray[Any, Any]]()
        for piece in pieces:
            assert isinstance(piece, SightPiece)
            assert piece.text[:1] == text[-1:] or not text
            text, hidden = [*text[:-1], *piece.text], [*hidden, *piece.hidden]
        assert length < len(text)
        return HostileState(self, [self.sight(text[: length + 1], hidden[:length])])

    def sight(self, text: Sequence[int], hidden: Sequence[np.ndarray[Any, Any]] = ()) -> Sight:
        self.sights.append(Sight(list(text), list(hidden)))
        return self.sights[-1]

    def fail_by_chance(self) -> None:
        if self.rng.random() < self.manners.raises:
            raise ProposerRaised("a third party's proposer raised")

    def continuation(self, text: Sequence[int], count: int) -> list[int]:
        """Return the next tokens as far as known, then arbitrary ones."""
        end = len(text)
        rest = next((whole[end:] for whole in self.texts if len(whole) > end and whole[:end] == text), [])
        return [*rest[:count], *self.tokens(count - len(rest[:count]))]

    def tokens(self, count: int) -> list[int]:
        return [int(token) for token in self.rng.integers(0, self.vocab, count)]


class HostileState(ProposerState):
    """Drafts for rows; can be restored from the prefix cache."""

    def __init__(self, proposer: HostileProposer, rows: list[Sight]):
        self.proposer, self.rows = proposer, rows

    def prefill(self, seen: Observation) -> None:
        self.proposer.fail_by_chance()
        if self.proposer.aux_layers:  # the whole prompt was given when the state was opened
            self._take(seen)

    def observe(self, seen: Observation) -> None:
        self.proposer.fail_by_chance()
        assert any(seen.tokens)  # rows whose logits were NaN have none
        self._take(seen)

    def _take(self, seen: Observation) -> None:
        assert len(seen.aux) == len(self.proposer.aux_layers)
        aux = np.concatenate([np.array(x) for x in seen.aux], axis=-1) if seen.aux else None
        for index, (row, tokens) in enumerate(zip(self.rows, seen.tokens, strict=True)):
            row.text.extend(tokens)
            row.hidden.extend([] if aux is None else aux[index, : len(tokens)])

    def draft(self, plan: Plan, sampling: SamplingBatch, positions: mx.array) -> Draft:
        """Draft what the plan asks for, or less."""
        self._check(positions)
        if plan.is_tree:
            return self._branches(plan, sampling)
        if plan.stop_below is not None:
            return self._until(plan.stop_below, plan.depth, sampling)
        rng = self.proposer.rng
        wide = self.proposer.manners.lengths and rng.random() < 0.3
        if rng.random() < 0.5:
            return self._chain(plan.depth, sampling)
        return self._chain(int(rng.integers(0, plan.depth + 4 if wide else plan.depth + 1)), sampling)

    def _until(self, stop_below: float, depth: int, sampling: SamplingBatch) -> Draft:
        """Draft a chain with early exit."""
        length = min(depth, CONFIDENCE_LAG + 1)
        confidences: list[list[float]] = []
        while length < depth:
            confidences.append([float(confidence) for confidence in self.proposer.rng.random(len(self.rows))])
            if sum(confidences[-1]) < stop_below * len(self.rows):
                break
            length += 1
        return replace(self._chain(length, sampling), confidences=confidences)

    def _branches(self, plan: Plan, sampling: SamplingBatch) -> Draft:
        """Draft trees of any shape, with equal numbers of nodes; some contain a part of the continuation."""
        rng = self.proposer.rng
        count = int(rng.integers(0, plan.nodes + 1))
        if not count or rng.random() < 0.1:
            return self._chain(min(count, plan.depth), sampling)
        grown = [self._grown(plan.depth, count) for _ in self.rows]
        return self._tree(plan.depth, [self._drafted(row, *tree) for row, tree in zip(self.rows, grown, strict=True)])

    def append(self, other: HostileState) -> None:
        self.proposer.fail_by_chance()
        self.rows.extend(other.rows)

    def remove(self, row: int) -> None:
        self.proposer.fail_by_chance()
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    def length(self, row: int) -> int:
        return len(self.rows[row].text) - 1

    def piece(self, row: int, start: int, end: int) -> SightPiece:
        self.proposer.fail_by_chance()
        sight = self.rows[row]
        assert 0 <= start < end < len(sight.text)
        return SightPiece(sight.text[start : end + 1], sight.hidden[start:end])

    def _check(self, positions: mx.array) -> None:
        """Check that a round begins at the end of the observed text."""
        self.proposer.fail_by_chance()
        if positions.tolist() != [len(row.text) for row in self.rows]:
            self.proposer.misplaced += 1  # the engine catches what `draft` raises

    def _chain(self, width: int, sampling: SamplingBatch) -> Draft:
        if not width:
            return Draft(mx.zeros((len(self.rows), 0), mx.int32), self._lengths(0))
        tokens = [self._spoiled(self.proposer.continuation(row.text, width)) for row in self.rows]
        probs = self._probs(width) if "rejection" in sampling.rules else None
        return Draft(mx.array(tokens, mx.int32), self._lengths(width), probs)

    def _probs(self, width: int) -> mx.array | None:
        """Return distributions from which the tokens may have been drawn, or None."""
        if self.proposer.rng.random() < 0.5:
            return None
        shape = (len(self.rows), width)
        return mx.array(self.proposer.rng.dirichlet(np.ones(self.proposer.vocab), shape), mx.float32)

    def _lengths(self, width: int) -> mx.array:
        """Return the number of valid tokens of each row."""
        rng = self.proposer.rng
        low, high = (-3, width + 5) if self.proposer.manners.lengths else (0, width + 1)
        return mx.array([width if rng.random() < 0.5 else int(rng.integers(low, high)) for _ in self.rows], mx.int32)

    def _spoiled(self, tokens: list[int]) -> list[int]:
        """Replace as many tokens by wrong ones as the row has errors in this round."""
        rng, vocab = self.proposer.rng, self.proposer.vocab
        wrong = rng.choice([0.0, 0.0, 0.05, 0.3, 1.0])
        tokens = [int(rng.integers(vocab)) if rng.random() < wrong else token for token in tokens]
        if self.proposer.manners.ids:
            outside = (-1, vocab, vocab + 7, 2**31 - 1, -(2**31))
            tokens = [int(rng.choice(outside)) if rng.random() < 0.1 else token for token in tokens]
        return tokens

    def _grown(self, depth: int, count: int) -> list[int]:
        """Return random parents of `count` nodes, within the depth limit."""
        parents: list[int] = []
        levels = [0]
        rng = self.proposer.rng
        straight = rng.random()
        while len(parents) < count:
            above = len(parents)  # the newest
            if levels[above] == depth or rng.random() > straight:
                above = int(rng.choice([n for n, level in enumerate(levels) if level < depth]))
            parents.append(above)
            levels.append(levels[parents[-1]] + 1)
        return parents

    def _drafted(self, row: Sight, *parents: int) -> tuple[list[int], list[int]]:
        """Return tokens for a tree's nodes, with the continuation along the first branch."""
        rng, manners = self.proposer.rng, self.proposer.manners
        continuation = self._spoiled(self.proposer.continuation(row.text, len(parents)))
        tip, reached = 0, 0
        taken: dict[int, set[int]] = {}
        tokens = []
        for node, above in enumerate(parents, 1):
            used = taken.setdefault(above, set())
            follows = above == tip and continuation[reached] not in used and rng.random() < 0.8
            free = [token for token in range(self.proposer.vocab) if token not in used]
            token = continuation[reached] if follows else int(rng.choice(free))
            if follows:
                tip, reached = node, reached + 1
            elif manners.ids and rng.random() < 0.1:
                token = self.proposer.vocab + node
            used.add(token)
            tokens.append(token)
        return tokens, list(parents)

    def _tree(self, depth: int, rows: list[tuple[list[int], list[int]]]) -> Draft:
        tokens, parents = (mx.array([row[part] for row in rows], mx.int32) for part in (0, 1))
        if self.proposer.manners.trees:
            rng, count = self.proposer.rng, tokens.shape[1]
            wrong = mx.array(rng.random(parents.shape) < rng.choice([0.0, 0.0, 0.1, 0.5]))
            parents = mx.where(wrong, mx.array(rng.integers(-2, count + 4, parents.shape), mx.int32), parents)
            tokens = mx.where(mx.array(rng.random(tokens.shape) < 0.1), mx.roll(tokens, 1, axis=1), tokens)
            depth = int(rng.integers(1, depth + 1))
        return Draft(tokens, self._lengths(tokens.shape[1]), tree=Tree(parents, depth))


class RandomPolicy:
    """Plans at random: nothing, a chain, early exit or a tree; plain rounds come in runs."""

    def __init__(self, rng: np.random.Generator, trees: bool):
        self.rng, self.wants_trees = rng, trees
        self._next = self._drawn()

    def _drawn(self) -> Plan:
        depth = int(self.rng.choice(DEPTHS))
        kind = self.rng.choice(["chain", "early exit", "tree"])
        if kind == "tree":
            return Plan(depth, depth + int(self.rng.integers(1, 12)))
        return Plan(depth, stop_below=float(self.rng.random()) if kind == "early exit" else None)

    def plan(self, context: Context) -> Plan:
        plan, can = self._next, context.can
        return Plan(plan.depth, plan.nodes if can.trees else 0, plan.stop_below if can.early_exit else None)

    def observe(self, result: RoundResult) -> None:
        plain = self.rng.random() < (0.6 if self._next == PLAIN else 0.15)
        self._next = PLAIN if plain else self._drawn()
