"""Rows of a fixed length, each filled with several short conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SHORTEST = 3
"""Tokens below which a piece holds no draft step: two that are read and one that is predicted."""
_OPEN = 32
"""Rows kept open for further pieces."""


@dataclass(frozen=True)
class Piece:
    """Tokens start..stop of a sample."""

    sample: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def order_of(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """The permutation of an epoch, a function of the seed and the epoch alone."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def cut(sample: int, tokens: int, length: int) -> list[Piece]:
    """A sample as pieces of at most `length` tokens; ends too short to learn from are left out."""
    starts = range(0, tokens, length)
    pieces = (Piece(sample, start, min(start + length, tokens)) for start in starts)
    return [piece for piece in pieces if len(piece) >= SHORTEST]


def pack(lengths: Sequence[int], order: Sequence[int] | NDArray[np.int64], length: int) -> list[tuple[Piece, ...]]:
    """Samples in the given order, laid into rows of at most `length` tokens.

    Each piece goes to the fullest open row that has room; a row is closed when too many are open. Same input, same
    rows.
    """
    done: list[list[Piece]] = []
    open_rows: list[tuple[int, list[Piece]]] = []
    for sample in order:
        for piece in cut(int(sample), lengths[int(sample)], length):
            fits = [(room, i) for i, (room, _) in enumerate(open_rows) if room >= len(piece)]
            if fits:
                room, i = min(fits)
                open_rows[i][1].append(piece)
                open_rows[i] = (room - len(piece), open_rows[i][1])
            else:
                open_rows.append((length - len(piece), [piece]))
                i = len(open_rows) - 1
            if open_rows[i][0] < SHORTEST:
                done.append(open_rows.pop(i)[1])
            elif len(open_rows) > _OPEN:
                done.append(open_rows.pop(open_rows.index(min(open_rows, key=lambda row: row[0])))[1])
    done.extend(row for _, row in open_rows)
    return [tuple(row) for row in done]
