"""What a proposer drafts and a verify judges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from eagle_mlx.decoding.tree import Tree
from eagle_mlx.request_state import Pending


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
