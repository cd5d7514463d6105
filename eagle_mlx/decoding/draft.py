"""What a round drafts for each row: a chain, or a tree, in which a node sees its own branch alone.

Sources: Miao et al. 2024, SpecInfer, section 4.2 (one verify for a whole tree); Li et al. 2024, EAGLE-2, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from eagle_mlx.request_state import Pending


@dataclass(frozen=True)
class Branches:
    """How the next forward's L positions hang together with the T >= L entries of their tree, theirs the last of them.

    Entries lie behind the text in the order in which they were written; each position sees the text and its own branch.
    """

    seen: mx.array
    """[B, L, T] bool, which entries of the tree each position sees, itself included."""
    depths: mx.array
    """[B, T] int32, how far behind the text each entry stands: what its place in the sequence would be."""

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
    """Node 0 is each row's newest token, node i + 1 its i-th draft token; parents come before their children."""

    parents: mx.array
    """[B, n] int32: the node that draft token i hangs below."""
    levels: int
    """A bound of the depth, on the host."""
    scores: mx.array | None = None
    """[B, n] float32, where the proposer knows it: the logarithm of the chance that the branch down to each draft token
    stands, by the proposer's own reckoning."""

    def branches(self) -> Branches:
        """As the target's verify reads it: each node sees itself and its ancestors.

        With the steps to a node's parent and to itself as a matrix, its second power reaches two steps up, its fourth
        four, and so on. The entries count ways, of which there are few. A node deeper than `levels` sees itself alone,
        and so is on no path: it may have been reached in part only.
        """
        nodes = mx.arange(self.parents.shape[1] + 1, dtype=mx.int32)
        above = mx.pad(self.parents, [(0, 0), (1, 0)])  # the newest token's is itself
        itself = nodes[:, None] == nodes
        reach = ((above[..., None] == nodes) | itself).astype(mx.float32)
        for _ in range((self.levels - 1).bit_length()):
            reach = reach @ reach
        seen = reach > 0
        depths = seen.sum(axis=-1) - 1
        whole = seen[..., 0] & (depths <= self.levels)
        return Branches(mx.where(whole[..., None], seen, itself), mx.where(whole, depths, 0))


@dataclass(frozen=True)
class Path:
    """The nodes that a verify keeps, row by row: from the newest token down one branch."""

    nodes: mx.array
    """[B, levels + 1] int32; those behind `accepted` mean nothing."""
    accepted: mx.array
    """[B] int32, draft tokens on the path."""


def walk(samples: mx.array, drafts: mx.array, valid: mx.array, tree: Tree, branches: Branches) -> Path:
    """Down the tree as long as a child is the token that the target draws at its parent.

    samples: [B, n+1] int32, the target's own draw at every node; drafts: [B, n] int32, distinct below one parent;
    valid: [B, n] bool, which of them count. So at most one branch stands, and what it says is what plain decoding
    would have said.
    """
    drawn = mx.take_along_axis(samples, tree.parents, axis=1)
    stands = mx.pad((drafts == drawn) & valid, [(0, 0), (1, 0)], constant_values=mx.array(True))
    # A node is kept where all nodes of its branch stand.
    kept = ~mx.any(branches.seen & ~stands[:, None], axis=-1)
    accepted = mx.max(mx.where(kept, branches.depths, 0), axis=-1)
    # The branch of one node, also where a proposer gave siblings the same token, so that two branches stand.
    deepest = mx.argmax(mx.where(kept, branches.depths, -1), axis=-1)
    branch = mx.take_along_axis(branches.seen, deepest[:, None, None], axis=1)  # [B, 1, n+1]
    levels = mx.arange(tree.levels + 1, dtype=mx.int32)
    at_level = branch & (branches.depths[:, None] == levels[:, None])
    return Path(mx.argmax(at_level, axis=-1).astype(mx.int32), accepted)


def along(states: Sequence[mx.array], nodes: mx.array) -> tuple[mx.array, ...]:
    """Hidden states [B, n+1, H] at the nodes [B, D] of a path: [B, D, H] each."""
    return tuple(mx.take_along_axis(x, nodes[..., None], axis=1) for x in states)


@dataclass(frozen=True)
class Draft:
    """Draft tokens of a batch, a chain or a tree per row."""

    tokens: mx.array
    """[B, k] int32 target ids; k may be less than was asked for, and 0."""
    lengths: mx.array
    """[B] int32, how many of a row's tokens count; 0 is allowed."""
    probs: mx.array | None = None
    """[B, k, V] float32, the distributions that the tokens were drawn from; None where they were not drawn."""
    tree: Tree | None = None
    """How the tokens hang together; None for chains. The likeliest come first."""
    confidences: Sequence[Sequence[float]] = ()
    """Of early exits, as in `RoundResult`: the confidence of every row, for each time that the proposer looked."""

    def unjudged(self, row: int, emitted: Sequence[int]) -> Pending | None:
        """Return the part of a row's chain that follows what the row has emitted, None if nothing does.

        Waits for the draft, which has been computed once the round is collected.
        """
        length, count = cast(int, self.lengths[row].item()), len(emitted)
        tokens = cast(list[int], self.tokens[row, :length].tolist())
        if count >= length or tokens[:count] != list(emitted):
            return None
        probs = None if self.probs is None else self.probs[row, count:length] * 1  # a slice would keep all rows'
        if probs is not None:
            mx.eval(probs)
        return Pending(tokens[count:], probs)
