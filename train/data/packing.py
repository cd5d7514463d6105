"""Rows of several short conversations, and batches of rows that are about equally full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_TOKENS = 3
"""Tokens below which a piece holds no draft step: two that are read and one that is predicted."""
_WINDOW = 256
"""Rows' worth of pieces that are sorted by length before they are laid out."""
_PADDING_THRESHOLD = 0.05
"""Padding that is not worth laying out anew."""
_MAX_REPACKED_BATCHES = 64
"""Batches up to which that is done."""
_FULL_SHARE = 32
"""A row is full when less than 1/32 of it is left."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens start..stop of a sample."""

    sample: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


Row = tuple[Piece, ...]


def order_of(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """The permutation of an epoch, a function of the seed and the epoch alone."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def cut_into_pieces(sample: int, tokens: int, length: int) -> list[Piece]:
    """A sample as pieces of at most `length` tokens; ends too short to learn from are left out."""
    starts = range(0, tokens, length)
    pieces = (Piece(sample, start, min(start + length, tokens)) for start in starts)
    return [piece for piece in pieces if len(piece) >= MIN_TOKENS]


def pack(
    lengths: Sequence[int], order: Sequence[int] | NDArray[np.int64], length: int, filled: int | None = None
) -> list[Row]:
    """Samples in the given order, cut into pieces of at most `length` tokens and laid into rows of as many.

    Rows are filled up to `filled` tokens only, where that is given. Same input, same rows.

    Window by window the longest pieces come first, and each goes to the fullest row that has room for it. So no two
    rows together would fit into one, and a row is less than half full only where it is the only one.
    """
    rows: list[list[Piece]] = []
    filled = length if filled is None else filled
    open_rows: list[list[int]] = [[] for _ in range(length + 1)]
    """The rows that have so much room."""
    rooms = 0
    """Which rooms there are, bit by bit."""
    for window in _windows(lengths, order, length):
        for piece in sorted(window, key=len, reverse=True):
            fitting = rooms >> len(piece)
            if fitting:
                room = len(piece) + (fitting & -fitting).bit_length() - 1
                row = open_rows[room].pop()
                if not open_rows[room]:
                    rooms ^= 1 << room
                rows[row].append(piece)
            else:
                room, row = max(filled, len(piece)), len(rows)
                rows.append([piece])
            room -= len(piece)
            if room >= MIN_TOKENS:
                open_rows[room].append(row)
                rooms |= 1 << room
    return [tuple(row) for row in rows]


def _windows(
    lengths: Sequence[int], order: Sequence[int] | NDArray[np.int64], length: int
) -> Sequence[Sequence[Piece]]:
    windows: list[list[Piece]] = [[]]
    total = 0
    for sample in order:
        for piece in cut_into_pieces(int(sample), lengths[int(sample)], length):
            if total >= _WINDOW * length:
                windows.append([])
                total = 0
            windows[-1].append(piece)
            total += len(piece)
    return windows


@dataclass(frozen=True)
class Batch:
    """Rows that are learnt from together."""

    rows: tuple[Row, ...]
    width: int
    """Tokens that each of them is made as long as."""

    @property
    def tokens(self) -> int:
        return sum(len(piece) for row in self.rows for piece in row)


def multiple_of(length: int) -> int:
    """What widths are rounded up to, so that there are not too many of them."""
    return max(1, length // (2 * _FULL_SHARE))


def padding_of(batches: Sequence[Batch]) -> float:
    """The share of the batches' places that hold no token, 0 to 1."""
    places = sum(len(batch.rows) * batch.width for batch in batches)
    return 1 - sum(batch.tokens for batch in batches) / places if places else 0.0


def batches_of(lengths: Sequence[int], rows: int, length: int, seed: int, epoch: int) -> list[Batch]:
    """The samples as batches in the order of (seed, epoch), each of `rows` rows but for the last, which may have fewer.

    Where few samples leave much empty, rows are filled less far, so that all of them are about equally full, as long
    as that makes no more batches.
    """
    order = order_of(seed, epoch, len(lengths))

    def batched(filled: int) -> list[Batch]:
        return in_batches(pack(lengths, order, length, filled), rows, length, seed, epoch)

    best = batched(length)
    if padding_of(best) <= _PADDING_THRESHOLD or len(best) > _MAX_REPACKED_BATCHES:
        return best
    step = multiple_of(length)
    others = [batched(filled) for filled in range(length - step, length // 2, -step)]
    return min([best, *(other for other in others if len(other) <= len(best))], key=padding_of)


def in_batches(packed: Sequence[Row], rows: int, length: int, seed: int, epoch: int) -> list[Batch]:
    """The packed rows as batches of `rows`, the last of which may have fewer, in the order of (seed, epoch).

    Full rows meet at random. The others meet those that are about as full, and a batch is as wide as its fullest row,
    rounded up to a 64th of `length`: so what is padded is at most a 32nd of all places and one batch more. The batches
    follow one another at random, but for the short one at the end.
    """
    fills = np.array([sum(map(len, row)) for row in packed], np.int64)
    order = order_of(seed + 1, epoch, len(packed))
    left = length - fills[order]
    left[left * _FULL_SHARE < length] = 0
    order = order[np.argsort(left, kind="stable")]
    groups = [order[at : at + rows] for at in range(0, len(packed), rows)]
    whole = len(packed) // rows
    groups = [groups[i] for i in order_of(seed + 2, epoch, whole)] + groups[whole:]
    multiple = multiple_of(length)
    return [
        Batch(
            tuple(packed[row] for row in group.tolist()),
            min(length, -(-int(fills[group].max()) // multiple) * multiple),
        )
        for group in groups
    ]
