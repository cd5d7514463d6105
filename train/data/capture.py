"""Hidden states of a batch at the moment when it is learnt from."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.target import Target

from .batches import Rows


def capture_rows(target: Target, aux_layers: Sequence[int], rows: Rows) -> mx.array:
    """The states [B, L, (n + 1) * H] of packed rows: the aux layers' outputs and the last layer's, lazily.

    The target reads every conversation by itself, right-padded, so that none sees another.
    """
    tokens, places = unpack(rows)
    hidden = target.forward(mx.array(tokens), aux_layers=(*aux_layers, target.num_layers - 1)).aux
    states = mx.concatenate(list(hidden), axis=-1)
    return states.reshape(-1, states.shape[-1])[mx.array(places)]


def unpack(rows: Rows) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The conversations of packed rows as tokens [N, T], and for each place [B, L] its index in the flattened N * T.

    Places behind a row's last token lead to index 0.
    """
    row, at = np.nonzero(rows.segments)
    segment = rows.segments[row, at]
    begins = np.concatenate([[True], (np.diff(row) != 0) | (np.diff(segment) != 0)]) if len(row) else np.zeros(0, bool)
    number = np.cumsum(begins) - 1
    starts = np.flatnonzero(begins)
    offset = np.arange(len(row)) - starts[number]
    tokens = np.zeros((len(starts), int(offset.max(initial=0)) + 1), np.int32)
    tokens[number, offset] = rows.tokens[row, at]
    places = np.zeros(rows.tokens.shape, np.int32)
    places[row, at] = number * tokens.shape[1] + offset
    return tokens, places
