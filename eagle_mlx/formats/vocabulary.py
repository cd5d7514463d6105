"""The maps between a head's draft vocabulary and its target's."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np

from eagle_mlx.errors import CheckpointError


def take_draft_vocabulary(
    where: Path, tensors: dict[str, mx.array], vocab_size: int, draft_vocab_size: int
) -> mx.array | None:
    """Take d2t and t2d out of the tensors; d2t int32 [Vd], or None where the head drafts the whole vocabulary.

    Raises CheckpointError for maps that are missing, damaged or that contradict each other.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    for name, value, size in (("d2t", d2t, draft_vocab_size), ("t2d", t2d, vocab_size)):
        if value is not None and value.shape != (size,):
            raise CheckpointError(f"{name} in {where} has shape {value.shape}, expected ({size},)")
        if value is not None and not (value.dtype == mx.bool_ or mx.issubdtype(value.dtype, mx.integer)):
            raise CheckpointError(f"{name} in {where} holds numbers of type {value.dtype}, expected whole ones")
    if d2t is None:
        if draft_vocab_size != vocab_size:
            raise CheckpointError(
                f"{where} lacks d2t, but its draft vocabulary ({draft_vocab_size}) is smaller than the "
                f"target's ({vocab_size})"
            )
        d2t = mx.zeros(vocab_size, mx.int32)
    kept = np.array(d2t, np.int64) + np.arange(draft_vocab_size)
    if kept.min() < 0 or kept.max() >= vocab_size or np.any(np.diff(kept) <= 0):
        raise CheckpointError(f"d2t in {where} does not lead to ascending ids of a vocabulary of {vocab_size}")
    if t2d is not None and not np.array_equal(np.flatnonzero(np.array(t2d)), kept):
        raise CheckpointError(f"t2d and d2t in {where} name different draft vocabularies; one of them is damaged")
    return None if draft_vocab_size == vocab_size else d2t.astype(mx.int32)


def vocabulary_tensors(d2t: mx.array | None, vocab_size: int) -> dict[str, mx.array]:
    """The tensors that say the same: d2t int64 [Vd] and t2d bool [V]; none for a head of the whole vocabulary."""
    if d2t is None:
        return {}
    offsets = np.array(d2t, np.int64)
    t2d = np.zeros(vocab_size, np.bool_)
    t2d[np.arange(len(offsets)) + offsets] = True
    return {"d2t": mx.array(offsets), "t2d": mx.array(t2d)}
