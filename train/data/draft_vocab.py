"""The draft vocabulary: the tokens that the target's answers use most."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from numpy.typing import NDArray

from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.target import Target

from ..config import TrainConfig


def count_tokens(samples: Iterable[tuple[Sequence[int], Sequence[int]]], vocab_size: int) -> NDArray[np.int64]:
    """How often each token id is to be learnt (loss mask 1) in pairs of tokens and mask: counts [V]."""
    counts = np.zeros(vocab_size, np.int64)
    for tokens, mask in samples:
        learnt = np.asarray(tokens, np.int64)[np.asarray(mask, bool)]
        counts += np.bincount(learnt, minlength=vocab_size)
    return counts


def choose_draft_vocab(counts: NDArray[np.int64], size: int, always: Collection[int] = ()) -> NDArray[np.int64]:
    """The `size` most frequent token ids of counts [V], ascending; `always` (special tokens) are among them.

    Equal counts go by the lower id, so the choice is the same everywhere. Raises ConfigError for a size that is
    larger than the vocabulary or smaller than `always`.
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
    """The share of counted tokens that the draft vocabulary can say; 1.0 where nothing was counted."""
    total = int(counts.sum())
    return float(counts[kept].sum() / total) if total else 1.0


def special_token_ids(tokenizer: TokenizerWrapper) -> frozenset[int]:
    """The ids that a draft vocabulary should always hold: end of turn and the tokenizer's other special tokens."""
    return frozenset(tokenizer.eos_token_ids) | frozenset(tokenizer.all_special_ids)


def draft_vocabulary(
    target: Target, config: TrainConfig, counts: NDArray[np.int64], head: DraftHead | None
) -> tuple[NDArray[np.int64] | None, float]:
    """The kept ids, None for all, and the share of the learnt tokens that they cover."""
    if head is not None:
        ids = None if head.token_ids is None else np.array(head.token_ids, np.int64)
        return ids, 1.0 if ids is None else coverage(counts, ids)
    if not 0 < config.head.draft_vocab < target.vocab_size:
        return None, 1.0
    always = special_token_ids(target.tokenizer) if target.tokenizer is not None else frozenset[int]()
    kept = choose_draft_vocab(counts, config.head.draft_vocab, always)
    return kept, coverage(counts, kept)
