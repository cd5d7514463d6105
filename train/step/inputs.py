"""Inputs of a training step: the positions and labels of each draft step, and noise on the hidden states.

Source of the noise: Li et al. 2024, EAGLE, section 4.2: U(-0.1, 0.1). As in SafeAILab's code, it is scaled by
512 / tokens for longer conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..data import Rows

Indices = NDArray[np.intp]
Mask = NDArray[np.bool_]
ANCHORS = 512  # maximum anchors of a conversation in one pass. Source: vllm-project/speculators, DFlash's `max_anchors`


@dataclass(frozen=True)
class InputPlan:
    """Positions and labels: step j at index t reads token t+1+j; its label is the target's distribution at u = t+1+j.

    All steps share the U positions u with loss, so the target's distribution is computed once per position. The head's
    positions t are gathered into lists of P per row, so that positions without loss are not computed.
    """

    positions: NDArray[np.int32]  # [B, P]: indices t, those with more draft steps first; short rows end with zeros
    labels: NDArray[np.int32]  # [U]: u as an index into the flattened batch [B * L]
    select: NDArray[np.int32]  # [S, U]: for step j and u, the index of t = u-1-j in the flattened [B * P]
    valid: NDArray[np.float32]  # [S, U]: 1 if t is in the same conversation as u, else 0

    @property
    def counts(self) -> NDArray[np.float32]:
        """[S]: number of positions with loss in each step."""
        counts: NDArray[np.float32] = self.valid.sum(axis=1, dtype=np.float32)
        return counts


def make_plan(rows: Rows, steps: int, multiple: int = 1) -> InputPlan:
    """Return the plan of a batch for `steps` draft steps.

    The token predicted at u is token u+1. It must be in the loss mask and in u's conversation. P and U are rounded up
    to multiples of `multiple`, which saves compilations on a GPU.
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
    return _plan(segments.shape, row, u, at, valid, multiple)


def make_anchor_plan(
    rows: Rows, steps: int, seed: int, step: int, multiple: int = 1, share: Callable[[int], float] = lambda slot: 1.0
) -> InputPlan:
    """Return the plan of a batch for block drafters: `positions` are anchors, draft step j at anchor t is slot j.

    Slot j predicts token t+1+j; its label is the target's distribution at u = t+j. An anchor needs a position before it
    in its conversation, and loss on its own and on the next token. Later slots count as long as all tokens from the
    anchor on have loss. Each conversation has up to 512 anchors, drawn from (seed, step) and the row's index, so the
    draw does not depend on which process computes the row. Slot j keeps at most `share(j)` of each row's anchors, drawn
    from those that keep slot j-1.
    """
    segments = rows.segments
    width, length = segments.shape
    same = np.zeros((width, length + steps), bool)
    same[:, 1:length] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    linked = same.copy()
    linked[:, 1:length] &= (rows.loss_mask[:, 1:] == 1) & (rows.loss_mask[:, :-1] == 1)
    reached = [same[:, :length]]
    for ahead in range(1, steps + 1):
        reached.append(reached[-1] & linked[:, ahead : ahead + length])
    kept = [_drawn(reached[1], rows, seed, step)]
    most = kept[0].sum(axis=1)
    order = np.stack([np.random.default_rng([seed, step, rows.first + i, 1]).random(length) for i in range(width)])
    for slot in range(1, steps):
        open_ = kept[-1] & reached[slot + 1]
        place = np.argsort(np.argsort(np.where(open_, order, 2.0), axis=1), axis=1)
        kept.append(open_ & (place < np.floor(share(slot) * most)[:, None]))
    judged = np.zeros((width, length), bool)
    for slot in range(steps):
        judged[:, slot:] |= kept[slot][:, : max(0, length - slot)]
    row, u = np.nonzero(judged)
    at = u[None] - np.arange(steps)[:, None]  # [S, U]
    inside = np.maximum(at, 0)
    valid = np.stack([kept[slot][row, inside[slot]] for slot in range(steps)]) & (at >= 0)
    return _plan(segments.shape, row, u, at, valid, multiple)


def _drawn(possible: Mask, rows: Rows, seed: int, step: int) -> Mask:
    """Return at most `ANCHORS` random positions of each conversation among the possible ones, [B, L]."""
    chosen = possible.copy()
    for index, (open_, segments) in enumerate(zip(possible, rows.segments, strict=True)):
        rng = np.random.default_rng([seed, step, rows.first + index])
        for segment in range(1, int(segments.max(initial=0)) + 1):
            places = np.flatnonzero(open_ & (segments == segment))
            chosen[index, rng.permutation(places)[ANCHORS:]] = False
    return chosen


def _plan(shape: tuple[int, ...], row: Indices, u: Indices, at: Indices, valid: Mask, multiple: int) -> InputPlan:
    """Return the plan for labels at (row, u), each [U], read at indices `at` [S, U] where `valid` [S, U]."""
    width, length = shape
    read = np.zeros((width, length), np.int32)
    np.add.at(read, (np.broadcast_to(row, at.shape)[valid], at[valid]), 1)
    count = min(_round_up(int((read > 0).sum(axis=1).max(initial=0)), multiple), length)
    order = np.argsort(-read, axis=1, kind="stable")
    positions = np.where(np.take_along_axis(read, order, axis=1) > 0, order, 0)[:, :count]
    place = np.argsort(order, axis=1) + np.arange(width)[:, None] * count
    select = np.where(valid, place[row[None], np.maximum(at, 0)], 0)
    padding = _round_up(len(u), multiple) - len(u)
    return InputPlan(
        positions.astype(np.int32),
        np.pad(row * length + u, (0, padding)).astype(np.int32),
        np.pad(select, ((0, 0), (0, padding))).astype(np.int32),
        np.pad(valid, ((0, 0), (0, padding))).astype(np.float32),
    )


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def noise_of(rows: Rows, size: float, seed: int, step: int) -> dict[str, NDArray[Any]]:
    """Return a step's noise: `noise` [B, L] float32, its maximum, and `keys` [B, 2] uint32 by row; none for size 0."""
    if not size:
        return {}
    width = len(rows.segments)
    places = rows.segments + np.arange(width)[:, None] * (int(rows.segments.max(initial=0)) + 1)
    lengths = np.bincount(places.reshape(-1))[places]
    keys = np.random.default_rng([seed, step]).integers(0, 1 << 32, (rows.first + width, 2), dtype=np.uint32)
    return {"noise": (size * np.minimum(512 / lengths, 1)).astype(np.float32), "keys": keys[rows.first :]}


def add_noise(arrays: Mapping[str, mx.array], states: mx.array) -> mx.array:
    """Return states [B, L, n] with the noise from a part's arrays added."""
    drawn = [mx.random.uniform(-1, 1, states.shape[1:], key=arrays["keys"][row]) for row in range(states.shape[0])]
    return states + arrays["noise"][..., None] * mx.stack(drawn)
