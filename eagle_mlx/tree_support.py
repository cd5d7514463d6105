"""Whether a target reads draft trees as it reads chains: tried on a few tokens, whatever the architecture."""

from __future__ import annotations

import math
from typing import cast

import mlx.core as mx

from eagle_mlx.cache import RaggedCache
from eagle_mlx.target import Target
from eagle_mlx.tree import Tree

_TEXT = (5, 3, 7, 2, 6)
_NODES = (4, 9, 8, 7, 3)
"""The newest token, two that may follow it, and one behind each of those."""
_PARENTS = (0, 0, 1, 2)
_BRANCHES = ((0, 1, 3), (0, 2, 4))
_NEXT = 5
_SHARE = 0.1
"""A tree is read right where it differs from the chains by less than this share of what a wrong reading would."""


def why_no_trees(target: Target, kv_bits: int | None = None) -> str | None:
    """None where trees give this target's own logits, else the reason why not.

    Costs nine forwards of a few tokens.
    """
    if not RaggedCache.of(target.model, 1, kv_bits).may_branch:
        return "it keeps a state or chunks, which cannot be rolled back to a branch"
    try:
        right, wrong, tree = _readings(target, kv_bits)
    except Exception as e:  # whatever a model stumbles over that takes its positions for a chain's
        return f"it cannot read one: {e}"
    off, room = _distance(tree, right), _distance(wrong, right)
    if off <= _SHARE * room:
        return None
    return f"it reads one otherwise than its branches (off by {off:.1e} of {room:.1e})"


def _readings(target: Target, kv_bits: int | None) -> tuple[mx.array, mx.array, mx.array]:
    """Logits of the two branches and of a token behind the second: as chains, as one chain of all, as a tree."""
    tokens = [t % target.vocab_size for t in _NODES]
    first, second = ([tokens[node] for node in branch] for branch in _BRANCHES)
    right = mx.concatenate([_chain(target, kv_bits, first), _chain(target, kv_bits, [*second, _NEXT])], axis=1)
    straight = _chain(target, kv_bits, [*tokens, _NEXT])
    wrong = [straight[:, list(branch)] for branch in _BRANCHES]
    cache = _begun(target, kv_bits)
    cache.branch(Tree(mx.array([_PARENTS], mx.int32), 2).branches())
    grown = target.forward(mx.array([tokens], mx.int32), cache).logits
    cache.keep([[node - 1 for node in _BRANCHES[1][1:]]], [len(_TEXT)])
    cache.advance(len(_BRANCHES[1]))
    behind = target.forward(mx.array([[_NEXT]], mx.int32), cache).logits
    tree = [grown[:, list(branch)] for branch in _BRANCHES]
    return right, mx.concatenate([*wrong, straight[:, -1:]], axis=1), mx.concatenate([*tree, behind], axis=1)


def _begun(target: Target, kv_bits: int | None) -> RaggedCache:
    cache = RaggedCache.of(target.model, 1, kv_bits)
    mx.eval(target.forward(mx.array([[t % target.vocab_size for t in _TEXT]], mx.int32), cache).logits)
    cache.advance(len(_TEXT))
    return cache


def _chain(target: Target, kv_bits: int | None, tokens: list[int]) -> mx.array:
    return target.forward(mx.array([tokens], mx.int32), _begun(target, kv_bits)).logits


def _distance(a: mx.array, b: mx.array) -> float:
    return math.sqrt(cast(float, mx.mean(mx.square((a - b).astype(mx.float32))).item()))
