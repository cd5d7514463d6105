"""Numbers that both the scripts that make golden files and the tests that read them can draw: no file holds weights.

RandomState is frozen: NumPy promises the same numbers for the same seed in every release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np

HIDDEN, VOCAB, DRAFT_VOCAB, LENGTH, STEPS = 64, 256, 96, 12, 4
CHAINS = (3, 7)
"""Positions at which the recycled steps are compared."""
TOKENS = np.random.RandomState(5).randint(0, VOCAB, LENGTH + STEPS + 1)
KEPT = np.sort(np.random.RandomState(6).permutation(VOCAB)[:DRAFT_VOCAB])


def draw(name: str, shape: Sequence[int], spread: float = 0.12) -> np.ndarray:
    """A tensor of a checkpoint, by its name: float32, exact in float16 so that files could be small."""
    rng = np.random.RandomState(crc32(name.encode()))
    if name == "d2t":
        return KEPT - np.arange(len(KEPT))
    if name == "t2d":
        return np.isin(np.arange(VOCAB), KEPT)
    if len(shape) == 1:
        centre = 0.0 if name.endswith("bias") else 1.0
        return rng.uniform(centre - 0.5, centre + 0.5, shape).astype(np.float16).astype(np.float32)
    return rng.normal(0.0, spread, shape).astype(np.float16).astype(np.float32)


def packed(name: str, value: Any, quantization: Mapping[str, Any] | None) -> dict[str, Any]:
    """A tensor of a checkpoint, in MLX's packing if its head is quantized and the tensor fits the groups."""
    if quantization is None or value.ndim < 2 or value.shape[-1] % quantization["group_size"]:
        return {name: value}
    import mlx.core as mx

    parts = mx.quantize(value, quantization["group_size"], quantization["bits"])
    return dict(zip((name, *(name.replace(".weight", f".{end}") for end in ("scales", "biases"))), parts, strict=True))


ANCHORS = (5, 8, 9, 13, 17)
"""Positions of the newest tokens of five blocks. Each block keeps at most four drafts of the one before it."""
BLOCK_TOKENS = np.random.RandomState(7).randint(0, VOCAB, 24)


def block_context(index: int) -> np.ndarray:
    """A layer's hidden states before and in the blocks: [24, HIDDEN] float32."""
    return draw(f"context of layer {index}", (len(BLOCK_TOKENS), HIDDEN), spread=1.5)


def aux(index: int) -> np.ndarray:
    """A layer's hidden states, or with -1 the last layer's: [LENGTH, HIDDEN] float32."""
    return draw(f"hidden states of layer {index}", (LENGTH, HIDDEN), spread=1.5)


def target(part: str) -> np.ndarray:
    """The target's `embed_tokens` and `lm_head` [VOCAB, HIDDEN], or its final `norm` [HIDDEN]."""
    shape = (HIDDEN,) if part == "norm" else (VOCAB, HIDDEN)
    return draw(f"the target's {part}", shape, spread=0.3)
