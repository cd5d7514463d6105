"""A round's draft for each row: a chain, or a tree in which each node attends only to its own branch.

Sources: Miao et al. 2024, SpecInfer, section 4.2 (one verify for a whole tree); Li et al. 2024, EAGLE-2, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx


@dataclass(frozen=True)
class Branches:
    """The tree structure of the next forward's L positions, which are the last of the tree's T >= L entries. Entries
    follow the text in the order in which they were written; each position sees the text and its own branch."""

    seen: mx.array  # [B, L, T] bool: the tree entries that each position sees, including itself
    depths: mx.array  # [B, T] int32: each entry's distance from the text as in a sequence

    @property
    def count(self) -> int:
        return self.seen.shape[1]

    @property
    def before(self) -> int:
        """Entries of the tree that were written by earlier forwards."""
        return self.seen.shape[2] - self.seen.shape[1]

    @property
    def asking(self) -> mx.array:
        """[B, L] int32, the depths of the new positions."""
        return self.depths[:, self.before :]


@dataclass(frozen=True)
class Tree:
    """A draft tree. Node 0 is each row's newest token, node i + 1 its i-th draft token; parents precede children."""

    parents: mx.array  # [B, n] int32: the parent node of each draft token
    levels: int  # an upper bound on the depth, on the host

    def branches(self) -> Branches:
        """Return the structure for the target's verify: each node sees itself and its ancestors.

        The matrix of steps to a node's parent and to itself reaches two steps up when squared, four when squared again,
        and so on. A node deeper than `levels` may be reached only in part, so it sees only itself and is on no path.
        """
        nodes = mx.arange(self.parents.shape[1] + 1, dtype=mx.int32)
        above = mx.pad(self.parents, [(0, 0), (1, 0)])  # the newest token is its own parent
        itself = nodes[:, None] == nodes
        reach = ((above[..., None] == nodes) | itself).astype(mx.float32)
        for _ in range((self.levels - 1).bit_length()):
            reach = reach @ reach
        seen = reach > 0
        depths = seen.sum(axis=-1) - 1
        whole = seen[..., 0] & (depths <= self.levels)
        return Branches(mx.where(whole[..., None], seen, itself), mx.where(whole, depths, 0))


def walk(
    samples: mx.array, drafts: mx.array, valid: mx.array, tree: Tree, branches: Branches
) -> tuple[mx.array, mx.array]:
    """Follow the tree down while a child equals the token that the target draws at its parent.

    samples: [B, n+1] int32, the target's draw at every node; drafts: [B, n] int32; valid: [B, n] bool, which drafts are
    real. Returns the accepted branch's nodes from the newest token down, [B, levels + 1] int32, and the number of draft
    tokens on it, [B] int32; nodes after these are meaningless.
    """
    drawn = mx.take_along_axis(samples, tree.parents, axis=1)
    stands = mx.pad((drafts == drawn) & valid, [(0, 0), (1, 0)], constant_values=mx.array(True))
    # A node is accepted if all nodes of its branch are.
    kept = ~mx.any(branches.seen & ~stands[:, None], axis=-1)
    accepted = mx.max(mx.where(kept, branches.depths, 0), axis=-1)
    # Take one node's branch, even if a proposer gave siblings the same token and two branches are accepted.
    deepest = mx.argmax(mx.where(kept, branches.depths, -1), axis=-1)
    branch = mx.take_along_axis(branches.seen, deepest[:, None, None], axis=1)  # [B, 1, n+1]
    levels = mx.arange(tree.levels + 1, dtype=mx.int32)
    at_level = branch & (branches.depths[:, None] == levels[:, None])
    return mx.argmax(at_level, axis=-1).astype(mx.int32), accepted


@dataclass(frozen=True)
class Draft:
    """The draft tokens of a batch: a chain or a tree per row."""

    tokens: mx.array  # [B, k] int32, ids of the target; k may be smaller than requested, or 0
    lengths: mx.array  # [B] int32, the number of real tokens in each row; may be 0
    probs: mx.array | None = None  # [B, k, V] float32, what the tokens were drawn from; None if they were not drawn
    tree: Tree | None = None  # the structure of the tokens, the most likely first; None for chains
    confidences: Sequence[Sequence[float]] = ()
    """For early exit, as in `RoundResult`: every row's confidence at each time that the proposer checked it."""

    def replaced(self, other: Draft, rows: Sequence[int]) -> Draft:
        """Return this draft of chains with those of `other`, which were not drawn, in rows that are not 0."""
        theirs, probs = mx.array([row > 0 for row in rows]), self.probs
        more = other.tokens.shape[1] - self.tokens.shape[1]
        ours = mx.pad(self.tokens, [(0, 0), (0, max(0, more))])
        tokens = mx.where(theirs[:, None], mx.pad(other.tokens, [(0, 0), (0, max(0, -more))]), ours)
        if probs is not None:
            certain = (tokens[..., None] == mx.arange(probs.shape[-1])).astype(probs.dtype)
            probs = mx.where(theirs[:, None, None], certain, mx.pad(probs, [(0, 0), (0, max(0, more)), (0, 0)]))
        return replace(self, tokens=tokens, lengths=mx.where(theirs, other.lengths, self.lengths), probs=probs)


def chains(rows: Sequence[Sequence[int]]) -> Draft:
    """Return a draft of these tokens, which were not drawn. It is as wide as the longest row."""
    lengths = [len(row) for row in rows]
    padded = [[*row, *[0] * (max(lengths) - len(row))] for row in rows]
    return Draft(mx.array(padded, mx.int32).reshape(len(rows), max(lengths)), mx.array(lengths, mx.int32))
