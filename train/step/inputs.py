"""What a step reads of a batch: which positions each draft step reads and is judged by, and noise on their states.

Source of the noise: Li et al. 2024, EAGLE, section 4.2: U(-0.1, 0.1). SafeAILab's code makes it smaller as
conversations grow, by 512 / tokens, and so does this.
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
class Plan:
    """Step j at index t reads token t+1+j, and is judged against the target's distribution at u = t+1+j.

    All steps share the U positions u that carry loss, so the target's distribution is computed once for each; and the
    head's own positions t are gathered into lists of P per row, so that nothing is computed where no loss comes from.
    """

    positions: NDArray[np.int32]
    """[B, P]: the indices t of each row, ascending; short rows end in zeros."""
    labels: NDArray[np.int32]
    """[U]: u as an index into the flattened batch [B * L]."""
    select: NDArray[np.int32]
    """[S, U]: for step j and u, the place of t = u-1-j in the flattened [B * P]."""
    valid: NDArray[np.float32]
    """[S, U]: 1 where t lies in the same conversation as u, else 0."""

    @property
    def counts(self) -> NDArray[np.float32]:
        """[S]: positions that carry loss in each step."""
        counts: NDArray[np.float32] = self.valid.sum(axis=1, dtype=np.float32)
        return counts


def make_plan(rows: Rows, steps: int, multiple: int = 1) -> Plan:
    """The plan of a batch for `steps` draft steps.

    The token predicted at u, which is token u+1, must be one to learn and belong to u's conversation. P and U are
    rounded up to multiples of `multiple`, which saves compilations on a GPU.
    """
    segments, mask = rows.segments, rows.loss_mask
    width, length = segments.shape
    judged = np.zeros((width, length), bool)
    judged[:, 1:-1] = (
        (mask[:, 2:] == 1) & (segments[:, 2:] == segments[:, 1:-1]) & (segments[:, :-2] == segments[:, 1:-1])
    )
    judged &= segments > 0
    row, u = np.nonzero(judged)
    at = u[None] - 1 - np.arange(steps)[:, None]  # [S, U]
    valid = (at >= 0) & (segments[row[None], np.maximum(at, 0)] == segments[row, u][None])
    needed = np.zeros((width, length), bool)
    needed[np.broadcast_to(row, at.shape)[valid], at[valid]] = True
    count = min(_round_up(int(needed.sum(axis=1).max(initial=0)), multiple), length)
    order = np.argsort(~needed, axis=1, kind="stable")[:, :count]
    positions = np.where(np.take_along_axis(needed, order, axis=1), order, 0)
    place = np.cumsum(needed, axis=1) - 1 + np.arange(width)[:, None] * count
    select = np.where(valid, place[row[None], np.maximum(at, 0)], 0)
    padding = _round_up(len(u), multiple) - len(u)
    return Plan(
        positions.astype(np.int32),
        np.pad(row * length + u, (0, padding)).astype(np.int32),
        np.pad(select, ((0, 0), (0, padding))).astype(np.int32),
        np.pad(valid, ((0, 0), (0, padding))).astype(np.float32),
    )


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


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
