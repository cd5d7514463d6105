"""Noise on the hidden states that a head reads in training, so that it learns to live with its own.

Source: Li et al. 2024, EAGLE, section 4.2: U(-0.1, 0.1). SafeAILab's code makes it smaller as conversations grow, by
512 / tokens, and so does this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..data import Rows

_LENGTH = 512
"""Tokens of a conversation at which the noise is as large as it is said to be."""


@dataclass(frozen=True)
class Noise:
    """The noise of a batch, row by row, so that it does not depend on which rows are computed together."""

    sizes: NDArray[np.float32]
    """[B, L], how large it may be at each position."""
    keys: NDArray[np.uint32]
    """[B, 2], from which each row's is drawn."""

    def part(self, first: int, count: int) -> Noise:
        """That of some rows."""
        at = slice(first, first + count)
        return Noise(self.sizes[at], self.keys[at])


def noise_of(rows: Rows, size: float, seed: int, step: int) -> Noise | None:
    """The noise of a run's step; None for none. Shorter conversations than 512 tokens get no more than `size`.

    A row's is the same in whichever process it is computed.
    """
    if not size:
        return None
    width = len(rows.segments)
    places = rows.segments + np.arange(width)[:, None] * (int(rows.segments.max(initial=0)) + 1)
    lengths = np.bincount(places.reshape(-1))[places]
    drawn = np.random.default_rng([seed, step]).integers(0, 1 << 32, (rows.first + width, 2), dtype=np.uint32)
    return Noise((size * np.minimum(_LENGTH / lengths, 1)).astype(np.float32), drawn[rows.first :])


def add_noise(arrays: Mapping[str, mx.array], states: mx.array) -> mx.array:
    """States [B, L, n] with the noise of a part's arrays."""
    drawn = [mx.random.uniform(-1, 1, states.shape[1:], key=arrays["keys"][row]) for row in range(states.shape[0])]
    return states + arrays["noise"][..., None] * mx.stack(drawn)
