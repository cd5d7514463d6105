"""A new head's start by least squares: the best linear guess of the target's next hidden state.

A head's first task is nearly linear: from the layers read at one token and the embedding of the next to the target's
last state at that next token. Solving it takes one pass over some thousand tokens and no gradient (docs/decisions.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]

_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
"""What is added to the inputs' mean square, as a share of it: from next to nothing to a strong pull towards zero."""
_HELD_OUT = 10
"""One piece in so many judges these, from the second on."""
_POSITIONS = 2048
"""Positions that are added at once: a product of matrices this long has the full speed of a BLAS."""
_JUDGES = 4096
"""Positions that judge, at most: enough to tell ridges apart that differ tenfold."""


@dataclass(frozen=True)
class Moments:
    """Sums over N positions of inputs x [D] and outputs y [E]."""

    xx: Matrix
    """[D, D]"""
    xy: Matrix
    """[D, E]"""
    count: int

    def add(self, x: mx.array, y: mx.array) -> Moments:
        """These and those of x [N, D] and y [N, E]; the matrices are changed in place, for they may fill a machine."""
        for total, product in ((self.xx, x.T @ x), (self.xy, x.T @ y)):
            total += np.asarray(product)
        return replace(self, count=self.count + len(x))

    def solution(self, ridge: float) -> Matrix:
        """B [D, E] with the least sum of |y - x B|² + ridge * mean(x²) * N * |B|²."""
        diagonal = self.xx.diagonal().copy()
        np.fill_diagonal(self.xx, diagonal + ridge * diagonal.mean())
        try:
            return np.linalg.solve(self.xx, self.xy)
        finally:
            np.fill_diagonal(self.xx, diagonal)

    def root_mean_square(self, b: Matrix) -> float:
        """That of the numbers x B, where B [d, E] knows the first d inputs alone."""
        size = len(b)
        squares = float((b * (self.xx[:size, :size] @ b)).sum(dtype=np.float64))
        return float(np.sqrt(squares / (self.count * b.shape[1])))


def bytes_of(inputs: int, outputs: int) -> int:
    """What finding a map takes at its peak: the moments, and as much again to add to them or to solve by them."""
    return 4 * (2 * inputs * (inputs + outputs) + (_JUDGES + 2 * _POSITIONS) * (inputs + outputs))


def error(b: Matrix, x: mx.array, y: mx.array) -> float:
    """The mean of |y - x B|² over x [N, D] and y [N, E]."""
    return float(mx.mean(mx.sum(mx.square(y - x @ mx.array(b)), axis=-1)))


Piece = tuple[mx.array, mx.array]
"""Inputs [n, D] and outputs [n, E] that belong together."""


def best_map(pieces: Iterable[Piece]) -> tuple[Matrix, Moments] | None:
    """The linear map B [D, E] that foretells best, and the moments that it was found by; None without pieces.

    The ridge is the one with the least error on pieces that are left out for this. Of a single piece none is, and it
    is the strongest.
    """
    found: Moments | None = None
    waiting: list[Piece] = []
    judges: list[Piece] = []
    for number, (x, y) in enumerate(pieces):
        piece = x.astype(mx.float32), y.astype(mx.float32)
        mx.eval(piece)
        judging = number % _HELD_OUT == 1 and _length(judges) < _JUDGES
        (judges if judging else waiting).append(piece)
        if _length(waiting) >= _POSITIONS:
            found = _added(found, waiting)
            waiting = []
    if waiting:
        found = _added(found, waiting)
    if found is None:
        return None
    if not judges:
        return found.solution(_RIDGES[-1]), found
    judged = _joined(judges)
    return min((found.solution(ridge) for ridge in _RIDGES), key=lambda b: error(b, *judged)), found


def _length(pieces: Sequence[Piece]) -> int:
    return sum(len(x) for x, _ in pieces)


def _joined(pieces: Sequence[Piece]) -> Piece:
    xs, ys = zip(*pieces, strict=True)
    return mx.concatenate(list(xs)), mx.concatenate(list(ys))


def _added(found: Moments | None, pieces: Sequence[Piece]) -> Moments:
    x, y = _joined(pieces)
    if found is None:
        inputs, outputs = x.shape[1], y.shape[1]
        found = Moments(np.zeros((inputs, inputs), np.float32), np.zeros((inputs, outputs), np.float32), 0)
    return found.add(x, y)


def factors(matrix: Matrix, rank: int) -> tuple[Matrix, Matrix]:
    """left [E, rank] and right [rank, D] of nearly equal size whose product is nearest to a matrix [E, D].

    Source: Eckart and Young 1936, by singular values.
    """
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    kept = min(rank, len(values))
    root = np.sqrt(values[:kept])
    out = np.zeros((len(matrix), rank), np.float32), np.zeros((rank, matrix.shape[1]), np.float32)
    out[0][:, :kept], out[1][:kept] = left[:, :kept] * root, root[:, None] * right[:kept]
    return out
