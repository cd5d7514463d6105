"""A third party's proposer and policy that use the protocols to the full, or break them, all of it by chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import eagle_mlx  # noqa: F401  (brings the fast BLAS before MLX)

import mlx.core as mx  # isort: skip
import numpy as np

from eagle_mlx.policy.base import Limits, Outcome, Shape
from eagle_mlx.proposers.base import Draft, Observation, ProposerState
from eagle_mlx.sampling import SamplingBatch
from eagle_mlx.target import Target
from eagle_mlx.tree import Tree

DEPTHS = (1, 2, 3, 5, 8, 20)
"""The longest is wider than the slack of a sliding window's ring."""


class ProposerRaised(Exception):
    """What a proposer raises that fails by chance."""


@dataclass(frozen=True)
class Manners:
    """How a proposer behaves."""

    aux_layers: tuple[int, ...] = ()
    lengths: bool = False
    """Gives lengths beyond its draft and below 0, and drafts wider than was asked for."""
    ids: bool = False
    """Drafts token ids outside the vocabulary."""
    trees: bool = False
    """Gives parents that there are not or that stand in a circle, equal siblings, and levels that are not all."""
    raises: float = 0.0
    """How often a call raises."""


@dataclass
class Sight:
    """What a proposer has been shown of one row."""

    text: list[int]
    """All tokens that it knows; the last one is the row's newest."""
    hidden: list[np.ndarray[Any, Any]] = field(default_factory=list)
    """Of the aux layers, one after the other in the last dimension: [H * layers] for each position that was read."""


class HostileProposer:
    """Drafts what a row will say as far as it is told in `known`, and is wrong at random, more or less by the round."""

    name = "hostile"

    def __init__(self, rng: np.random.Generator, known: list[list[int]], manners: Manners):
        """known: whole texts, prompt and continuation; more may be added at any time."""
        self.rng, self.known, self.manners = rng, known, manners
        self.aux_layers = manners.aux_layers
        self.sights: list[Sight] = []
        """All that there were, for who wants to compare them."""
        self.vocab = 0

    def bind(self, target: Target) -> None:
        self.vocab = target.vocab_size

    def open(self, prompts: Sequence[Sequence[int]]) -> HostileState:
        self.fail_by_chance()
        return HostileState(self, [self.sight(prompt[:1] if self.aux_layers else prompt) for prompt in prompts])

    def sight(self, text: Sequence[int], hidden: Sequence[np.ndarray[Any, Any]] = ()) -> Sight:
        self.sights.append(Sight(list(text), list(hidden)))
        return self.sights[-1]

    def fail_by_chance(self) -> None:
        if self.rng.random() < self.manners.raises:
            raise ProposerRaised("a third party's proposer raised")

    def continuation(self, text: Sequence[int], count: int) -> list[int]:
        """The next tokens as far as they are known, then any."""
        end = len(text)
        found = next((known[end:] for known in self.known if len(known) > end and known[:end] == text), [])
        return [*found[:count], *self.tokens(count - len(found[:count]))]

    def tokens(self, count: int) -> list[int]:
        return [int(token) for token in self.rng.integers(0, self.vocab, count)]


class HostileState:
    """Drafts for rows; its class has all methods that the engine may look for."""

    def __init__(self, proposer: HostileProposer, rows: list[Sight]):
        self.proposer, self.rows = proposer, rows

    def prefill(self, seen: Observation) -> None:
        self.proposer.fail_by_chance()
        self._take(seen)

    def observe(self, seen: Observation) -> None:
        self.proposer.fail_by_chance()
        assert all(seen.tokens)
        self._take(seen)

    def _take(self, seen: Observation) -> None:
        assert len(seen.aux) == len(self.proposer.aux_layers)
        aux = np.concatenate([np.array(x) for x in seen.aux], axis=-1) if seen.aux else None
        for index, (row, tokens) in enumerate(zip(self.rows, seen.tokens, strict=True)):
            row.text.extend(tokens)
            row.hidden.extend([] if aux is None else aux[index, : len(tokens)])

    def propose(self, depth: int, sampling: SamplingBatch, positions: mx.array) -> Draft:
        self._check(positions)
        wide = self.proposer.manners.lengths and self.proposer.rng.random() < 0.3
        if self.proposer.rng.random() < 0.5:
            return self._chain(depth, sampling)
        return self._chain(int(self.proposer.rng.integers(0, depth + 4 if wide else depth + 1)), sampling)

    def propose_until(self, limits: Limits, depth: int, sampling: SamplingBatch, positions: mx.array) -> Draft:
        """A chain that ends when the policy says so, and sometimes tokens beside it."""
        self._check(positions)
        rng, length = self.proposer.rng, 1
        chances: list[list[float]] = []
        while length < depth:
            chances.append([float(chance) for chance in rng.random(len(self.rows))])
            if limits.enough(chances[-1]):
                break
            length += 1
        more = 0 if limits.beside is None else limits.beside(length, chances)
        if not more:
            chain = self._chain(length, sampling)
            return replace(chain, chances=chances)
        grown = [self._grown(length, length + more, list(range(length))) for _ in self.rows]
        return self._tree(length, [self._drafted(row, *tree) for row, tree in zip(self.rows, grown, strict=True)])

    def propose_tree(self, depth: int, nodes: int, sampling: SamplingBatch, positions: mx.array) -> Draft:
        """Trees of any shape, as many nodes in each row; some of them hold a part of the continuation."""
        self._check(positions)
        rng = self.proposer.rng
        count = int(rng.integers(0, nodes + 1))
        if not count or rng.random() < 0.1:
            return self._chain(min(count, depth), sampling)
        grown = [self._grown(depth, count, []) for _ in self.rows]
        return self._tree(depth, [self._drafted(row, *tree) for row, tree in zip(self.rows, grown, strict=True)])

    def append(self, other: ProposerState) -> None:
        self.proposer.fail_by_chance()
        assert isinstance(other, HostileState)
        self.rows.extend(other.rows)

    def remove(self, row: int) -> None:
        self.proposer.fail_by_chance()
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    @property
    def arrays(self) -> list[mx.array]:
        return []

    def length(self, row: int) -> int:
        return len(self.rows[row].text) - 1

    def fork(self, row: int, length: int) -> HostileState:
        self.proposer.fail_by_chance()
        sight = self.rows[row]
        assert length < len(sight.text)
        return HostileState(self.proposer, [self.proposer.sight(sight.text[: length + 1], sight.hidden[:length])])

    def _check(self, positions: mx.array) -> None:
        """A round begins where the text ends that the state was shown."""
        self.proposer.fail_by_chance()
        assert positions.tolist() == [len(row.text) for row in self.rows]

    def _chain(self, width: int, sampling: SamplingBatch) -> Draft:
        if not width:
            return Draft(mx.zeros((len(self.rows), 0), mx.int32), self._lengths(0))
        tokens = [self._spoiled(self.proposer.continuation(row.text, width)) for row in self.rows]
        return Draft(
            mx.array(tokens, mx.int32), self._lengths(width), self._probs(width) if sampling.any_rejection else None
        )

    def _probs(self, width: int) -> mx.array | None:
        """Distributions that the tokens might have been drawn from, or none."""
        if self.proposer.rng.random() < 0.5:
            return None
        shape = (len(self.rows), width)
        return mx.array(self.proposer.rng.dirichlet(np.ones(self.proposer.vocab), shape), mx.float32)

    def _lengths(self, width: int) -> mx.array:
        """How many tokens count, row by row."""
        rng = self.proposer.rng
        low, high = (-3, width + 5) if self.proposer.manners.lengths else (0, width + 1)
        return mx.array([width if rng.random() < 0.5 else int(rng.integers(low, high)) for _ in self.rows], mx.int32)

    def _spoiled(self, tokens: list[int]) -> list[int]:
        """The tokens with as many of them wrong as this row has in this round."""
        rng, vocab = self.proposer.rng, self.proposer.vocab
        wrong = rng.choice([0.0, 0.0, 0.05, 0.3, 1.0])
        tokens = [int(rng.integers(vocab)) if rng.random() < wrong else token for token in tokens]
        if self.proposer.manners.ids:
            outside = (-1, vocab, vocab + 7, 2**31 - 1, -(2**31))
            tokens = [int(rng.choice(outside)) if rng.random() < 0.1 else token for token in tokens]
        return tokens

    def _grown(self, depth: int, count: int, parents: list[int]) -> list[int]:
        """The parents of `count` nodes: those that are given, then any that are not too deep."""
        parents = list(parents)
        levels = [0]
        for above in parents:
            levels.append(levels[above] + 1)
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
        """Tokens for the nodes of a tree, with the continuation on the branch that goes down first."""
        rng, manners = self.proposer.rng, self.proposer.manners
        known = self._spoiled(self.proposer.continuation(row.text, len(parents)))
        tip, reached = 0, 0
        taken: dict[int, set[int]] = {}
        tokens = []
        for node, above in enumerate(parents, 1):
            used = taken.setdefault(above, set())
            follows = above == tip and known[reached] not in used and rng.random() < 0.8
            free = [token for token in range(self.proposer.vocab) if token not in used]
            token = known[reached] if follows else int(rng.choice(free))
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
    """Asks for another shape every round: none, a chain, an elastic chain or a tree; plain rounds come in runs."""

    def __init__(self, rng: np.random.Generator, trees: bool):
        self.rng, self.wants_trees = rng, trees
        self._next = self._drawn()

    def _drawn(self) -> Shape:
        depth = int(self.rng.choice(DEPTHS))
        kind = self.rng.choice(["chain", "elastic", "tree"])
        return Shape(depth, depth + int(self.rng.integers(1, 12)) * (kind == "tree"), kind == "elastic")

    def _draw(self) -> None:
        plain = self.rng.random() < (0.6 if self._next.depth == 0 else 0.15)
        self._next = Shape.chain(0) if plain else self._drawn()

    def depth(self, rows: int) -> int:
        return self._next.depth

    def shape(self, rows: int, trees: bool, elastic: bool = False) -> Shape:
        shape = self._next
        return Shape(shape.depth, shape.nodes if trees else shape.depth, shape.elastic and elastic)

    def limits(self, rows: int, trees: bool) -> Limits:
        beside = (lambda length, chances: int(self.rng.integers(0, 5))) if trees else None
        return Limits(lambda chances: bool(self.rng.random() < 0.2), beside)

    def observe(self, depth: int, drafted: Sequence[int], accepted: Sequence[int], seconds: float) -> None:
        self._draw()

    def observe_tree(self, shape: Shape, kept: Sequence[Sequence[int]], seconds: float) -> None:
        self._draw()

    def observe_elastic(self, outcome: Outcome, seconds: float) -> None:
        self._draw()
