"""The draft vocabulary: the most frequent tokens in the target's answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from numpy.typing import NDArray

from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.target import Target

from ..config import TrainConfig


def count_tokens(samples: Iterable[tuple[Sequence[int], Sequence[int]]], vocab_size: int) -> NDArray[np.int64]:
    """Count each token id with loss mask 1 in pairs of tokens and mask: [V]."""
    counts = np.zeros(vocab_size, np.int64)
    for tokens, mask in samples:
        learned = np.asarray(tokens, np.int64)[np.asarray(mask, bool)]
        counts += np.bincount(learned, minlength=vocab_size)
    return counts


def choose_draft_vocab(counts: NDArray[np.int64], size: int, always: Collection[int] = ()) -> NDArray[np.int64]:
    """Return the `size` most frequent token ids of counts [V], ascending, including `always` (special tokens).

    Ties go to the lower id, so the result is reproducible. Raises ConfigError if `size` is larger than the vocabulary
    or smaller than `always`.
    """
    vocab_size = len(counts)
    if not 0 < size <= vocab_size:
        raise ConfigError(f"draft vocabulary of {size}: it must be between 1 and the target's {vocab_size}")
    kept = np.array(sorted({i for i in always if 0 <= i < vocab_size}), np.int64)
    if len(kept) > size:
        raise ConfigError(f"draft vocabulary of {size}: the target's {len(kept)} special tokens alone need more")
    order = np.argsort(-counts, kind="stable")
    rest = order[~np.isin(order, kept)][: size - len(kept)]
    return np.sort(np.concatenate([kept, rest]))


def coverage(counts: NDArray[np.int64], kept: NDArray[np.int64]) -> float:
    """Return the share of counted tokens that are in the draft vocabulary; 1.0 if there are none."""
    total = int(counts.sum())
    return float(counts[kept].sum() / total) if total else 1.0


def special_token_ids(tokenizer: TokenizerWrapper) -> frozenset[int]:
    """Return the ids that every draft vocabulary should have: end of turn and other special tokens."""
    return frozenset(tokenizer.eos_token_ids) | frozenset(tokenizer.all_special_ids)


def draft_vocabulary(
    target: Target, config: TrainConfig, counts: NDArray[np.int64], head: DraftHead | None
) -> tuple[NDArray[np.int64] | None, dict[str, Any]]:
    """Return the kept ids (None for all), and their number and coverage for the run's report."""
    kept: NDArray[np.int64] | None = None
    if head is not None:
        kept = None if head.token_ids is None else np.array(head.token_ids, np.int64)
    elif 0 < config.head.draft_vocab < target.vocab_size:
        always = special_token_ids(target.tokenizer) if target.tokenizer is not None else frozenset[int]()
        kept = choose_draft_vocab(counts, config.head.draft_vocab, always)
    if kept is None:
        return None, {"draft_vocab": target.vocab_size, "draft_vocab_coverage": 1.0}
    return kept, {"draft_vocab": len(kept), "draft_vocab_coverage": coverage(counts, kept)}
