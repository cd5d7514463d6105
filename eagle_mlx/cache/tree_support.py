"""Check whether a target reads draft trees exactly as it reads chains: by its type, then by a trial on a few tokens."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.cache import RaggedCache
from eagle_mlx.cache.kinds import ONE_ROW, OWN_POSITIONS, model_file
from eagle_mlx.decoding.draft import Tree
from eagle_mlx.target import Target

Logits = NDArray[np.float32]

_DRAWS = 3
"""Texts that are tried in one batch; more than half must match. Rounding alone sometimes changes one text's choice of
experts, but a model that ignores the tree's positions fails on all of them."""
_TEXT = 9
_PARENTS = (0, 0, 0, 0, 1, 3, 5)
"""The parents of a tree below the newest token. Its last nodes are far from where they would be in a chain."""
_BRANCHES = ((0, 3, 6), (0, 1, 5, 7))
_ROUNDING = 4.0
"""A tree matches if it differs from its branches by less than this factor times the rounding error, which is measured
as the difference between a chain and the same tokens read one by one."""
_LEAST = 16.0  # the least difference that is allowed, in units in the last place of a typical logit


def why_no_trees(target: Target, kv_bits: int | None = None) -> str | None:
    """Return why this target does not read trees exactly, None if it does. Costs ten forwards of a few tokens."""
    reasons = ONE_ROW | OWN_POSITIONS
    if (file := model_file(target.model)) in reasons:
        return reasons[file]
    if not RaggedCache.of(target.model, 1, kv_bits).may_branch:
        return "it keeps a state or chunks, which cannot be rolled back to a branch"
    try:
        tree, chains, last_chain, steps = _read_all(target, kv_bits)
    except Exception as e:  # a model that cannot use the tree's positions may raise anything
        return f"it cannot read one: {e}"
    off, rounding = _distance(tree, chains), _distance(steps, last_chain)
    size = _distance(chains, np.zeros_like(chains))
    room = np.maximum(_ROUNDING * rounding, _LEAST * float(mx.finfo(target.dtype).eps) * size)
    if np.sum(off <= room) > _DRAWS // 2:
        return None
    differ = f"off by {np.median(off):.1e}, by rounding {np.median(rounding):.1e}"
    return f"its logits for a tree differ from those for the tree's branches ({differ})"


def _read_all(target: Target, kv_bits: int | None) -> tuple[Logits, Logits, Logits, Logits]:
    """Return logits [_DRAWS, N, V] of two branches and a token after the second, read as a tree and as chains; and of
    the second chain, read at once and token by token."""
    rng = np.random.default_rng(0)
    text, nodes, following = (rng.integers(0, target.vocab_size, (_DRAWS, n)) for n in (_TEXT, len(_PARENTS) + 1, 1))
    first, second = (nodes[:, list(branch)] for branch in _BRANCHES)
    longer = np.concatenate([second, following], axis=1)
    cache = RaggedCache.of(target.model, _DRAWS, kv_bits)
    _read(target, cache, text)
    begun = cache.save()
    chains = []
    for chain in (first, longer):
        chains.append(_read(target, cache, chain))
        cache.restore(begun)
    steps = [_read(target, cache, token) for token in np.split(longer, longer.shape[1], axis=1)]
    cache.restore(begun)
    cache.branch(Tree(mx.array([_PARENTS] * _DRAWS, mx.int32), len(_BRANCHES[1]) - 1).branches())
    grown = _numbers(target.forward(mx.array(nodes, mx.int32), cache).logits)
    cache.keep([[node - 1 for node in _BRANCHES[1][1:]]] * _DRAWS, [_TEXT] * _DRAWS)
    cache.advance(len(_BRANCHES[1]))
    tree = [*(grown[:, list(branch)] for branch in _BRANCHES), _read(target, cache, following)]
    as_tree, as_chains, as_steps = (np.concatenate(parts, axis=1) for parts in (tree, chains, steps))
    return as_tree, as_chains, chains[-1], as_steps


def _read(target: Target, cache: RaggedCache, tokens: NDArray[np.int64]) -> Logits:
    logits = _numbers(target.forward(mx.array(tokens, mx.int32), cache).logits)
    cache.advance(tokens.shape[1])
    return logits


def _numbers(logits: mx.array) -> Logits:
    """Return float32 logits, with 0 for the infinite ones of impossible tokens: their difference would be NaN."""
    numbers = np.array(logits.astype(mx.float32))
    return np.where(np.isinf(numbers), np.float32(0), numbers)


def _distance(a: Logits, b: Logits) -> Logits:
    """Return the root mean square difference of each text, [_DRAWS]."""
    out: Logits = np.sqrt(np.mean(np.square(a - b), axis=(1, 2)))
    return out
