"""Rows of several short conversations, and batches of rows that are about equally full."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def batches_of(lengths: Sequence[int], rows: int, length: int, seed: int, epoch: int, first: int = 0) -> list[Batch]:
    """The batches of an epoch, each of `rows` rows but for the last, which may have fewer.

    Samples from the one numbered `first` on come before all others, which fill up their last batch.
    """
    if not 0 < first < len(lengths):
        return _batches_of(range(len(lengths)), lengths, rows, length, seed, epoch)
    batches = _batches_of(range(first, len(lengths)), lengths, rows, length, seed, epoch)
    others = [row for batch in _batches_of(range(first), lengths, rows, length, seed, epoch) for row in batch.rows]
    if batches and others and (missing := rows - len(batches[-1].rows)):
        batches[-1] = _batch([*batches[-1].rows, *others[-missing:]], length)
        del others[-missing:]
    return [*batches, *(_batch(others[at : at + rows], length) for at in range(0, len(others), rows))]


def _batch(rows: Sequence[Row], length: int) -> Batch:
    """These rows, made as long as the fullest of them, rounded up."""
    multiple = multiple_of(length)
    fullest = max(sum(map(len, row)) for row in rows)
    return Batch(tuple(rows), min(length, -(-fullest // multiple) * multiple))


def _batches_of(samples: range, lengths: Sequence[int], rows: int, length: int, seed: int, epoch: int) -> list[Batch]:
    """These samples as batches in the order of (seed, epoch).

    Where few samples leave much empty, rows are filled less far, so that all of them are about equally full, as long
    as that makes no more batches.
    """
    order = samples.start + order_of(seed, epoch, len(samples))

    def batched(filled: int) -> list[Batch]:
        return in_batches(pack(lengths, order, length, filled), rows, length, seed, epoch)

    best = batched(length)
    if padding_of(best) <= _PADDING_THRESHOLD or len(best) > _MAX_REPACKED_BATCHES:
        return best
    step = multiple_of(length)
    others = [batched(filled) for filled in range(length - step, length // 2, -step)]
    return min([best, *(other for other in others if len(other) <= len(best))], key=padding_of)


def learned_pieces(
    lengths: Sequence[int], rows: int, length: int, seed: int, begin: int, until: tuple[int, int], first: int = 0
) -> set[Piece]:
    """What was learned from, from the start of epoch `begin` up to an epoch and the number of its batches.

    In the first of these epochs samples from the one numbered `first` on came before all others.
    """
    epoch, batch = until
    if epoch > begin:
        return {piece for sample, tokens in enumerate(lengths) for piece in cut_into_pieces(sample, tokens, length)}
    batches = batches_of(lengths, rows, length, seed, epoch, first)[:batch] if batch else []
    return {piece for one in batches for row in one.rows for piece in row}


def count_learned(lengths: Sequence[int], pieces: Iterable[Piece]) -> tuple[int, int]:
    """How many samples, and how many of their tokens, these pieces are; an end too short to learn from counts too."""
    found: dict[int, int] = {}
    for piece in pieces:
        found[piece.sample] = found.get(piece.sample, 0) + len(piece)
    tokens = sum(lengths[i] if lengths[i] - seen < MIN_TOKENS else seen for i, seen in found.items())
    return len(found), tokens


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
    return [_batch([packed[row] for row in group.tolist()], length) for group in groups]
