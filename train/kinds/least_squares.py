"""Initialization of heads by least squares: the best linear prediction of the target's next hidden state.

A head's first task is nearly linear. Least squares needs one pass over a few thousand tokens and no gradients
(docs/decisions.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]

_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)  # candidate ridge strengths, relative to the inputs' mean square
_HELD_OUT = 10  # one piece in this many is held out to choose the ridge, starting with the second
_POSITIONS = 2048  # positions added at once. Matrix products of this length reach a BLAS's full speed
_JUDGES = 4096  # maximum held-out positions: enough to distinguish ridges that differ by a factor of ten


@dataclass
class Moments:
    """Sums over N positions of inputs x [D] and outputs y [E]."""

    xx: Matrix  # [D, D]
    xy: Matrix  # [D, E]
    count: int = 0

    def add(self, x: mx.array, y: mx.array) -> None:
        """Add x [N, D] and y [N, E]. The large matrices are changed in place, to save memory."""
        self.xx += np.asarray(x.T @ x)
        self.xy += np.asarray(x.T @ y)
        self.count += len(x)

    def solution(self, ridge: float) -> Matrix:
        """Return B [D, E] that minimizes the sum of |y - x B|² + ridge * mean(x²) * N * |B|²."""
        diagonal = self.xx.diagonal().copy()
        np.fill_diagonal(self.xx, diagonal + ridge * diagonal.mean())
        try:
            return np.linalg.solve(self.xx, self.xy)
        finally:
            np.fill_diagonal(self.xx, diagonal)

    def root_mean_square(self, b: Matrix) -> float:
        """Return the root mean square of x B, where B [d, E] uses only the first d inputs."""
        size = len(b)
        squares = float((b * (self.xx[:size, :size] @ b)).sum(dtype=np.float64))
        return float(np.sqrt(squares / (self.count * b.shape[1])))


def bytes_of(inputs: int, outputs: int) -> int:
    """Return the peak bytes of `best_map`: the moments, and as much again to update or solve them."""
    return 4 * (2 * inputs * (inputs + outputs) + (_JUDGES + 2 * _POSITIONS) * (inputs + outputs))


def error(b: Matrix, x: mx.array, y: mx.array) -> float:
    """Return the mean of |y - x B|² over x [N, D] and y [N, E]."""
    return float(mx.mean(mx.sum(mx.square(y - x @ mx.array(b)), axis=-1)))


Piece = tuple[mx.array, mx.array]  # inputs [n, D] and their outputs [n, E]


def best_map(pieces: Iterable[Piece]) -> tuple[Matrix, Moments] | None:
    """Return the best linear map B [D, E] and its moments, or None without pieces; held-out ones choose the ridge."""
    moments: Moments | None = None
    waiting: list[Piece] = []
    judges: list[Piece] = []
    for number, (x, y) in enumerate(pieces):
        piece = x.astype(mx.float32), y.astype(mx.float32)
        mx.eval(piece)
        inputs, outputs = x.shape[1], y.shape[1]
        moments = moments or Moments(np.zeros((inputs, inputs), np.float32), np.zeros((inputs, outputs), np.float32))
        judging = number % _HELD_OUT == 1 and _length(judges) < _JUDGES
        (judges if judging else waiting).append(piece)
        if _length(waiting) >= _POSITIONS:
            moments.add(*_joined(waiting))
            waiting = []
    if moments is None:
        return None
    if waiting:
        moments.add(*_joined(waiting))
    if not judges:
        return moments.solution(_RIDGES[-1]), moments
    judged = _joined(judges)
    return min(map(moments.solution, _RIDGES), key=lambda b: error(b, *judged)), moments


def _length(pieces: Sequence[Piece]) -> int:
    return sum(len(x) for x, _ in pieces)


def _joined(pieces: Sequence[Piece]) -> Piece:
    xs, ys = zip(*pieces, strict=True)
    return mx.concatenate(list(xs)), mx.concatenate(list(ys))


def factors(matrix: Matrix, rank: int) -> tuple[Matrix, Matrix]:
    """Return left [E, rank] and right [rank, D] of similar scale with a product near the matrix (truncated SVD)."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    kept = min(rank, len(values))
    root, missing = np.sqrt(values[:kept]), rank - kept
    left = np.pad(left[:, :kept] * root, ((0, 0), (0, missing)))
    right = np.pad(root[:, None] * right[:kept], ((0, missing), (0, 0)))
    return left.astype(np.float32), right.astype(np.float32)
