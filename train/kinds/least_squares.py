"""A new head's start by least squares: the best linear guess of the target's next hidden state.

A head's first task is nearly linear: from the layers read at one token and the embedding of the next to the target's
last state at that next token. Its solution costs one pass over some thousand tokens, and no gradient (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]

_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
"""What is added to the inputs' mean square, as a share of it: from next to nothing to a strong pull towards zero."""
_HELD_OUT = 10
"""One piece in so many judges these."""
_POSITIONS = 2048
"""Positions that are added at once: a product of matrices this long has the full speed of a BLAS."""


@dataclass(frozen=True)
class Moments:
    """Sums over N positions of inputs x [D] and outputs y [E]."""

    xx: Matrix
    """[D, D]"""
    xy: Matrix
    """[D, E]"""
    yy: float
    """The outputs' squares."""
    count: int

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.xx + other.xx, self.xy + other.xy, self.yy + other.yy, self.count + other.count)

    def solution(self, ridge: float) -> Matrix:
        """B [D, E] with the least sum of |y - x B|² + ridge * mean(x²) * N * |B|²."""
        damped = self.xx.copy()
        damped[np.diag_indices_from(damped)] += ridge * np.trace(self.xx) / len(self.xx)
        return np.linalg.solve(damped, self.xy)

    def root_mean_square(self, b: Matrix) -> float:
        """That of the numbers x B, where B [d, E] knows the first d inputs alone."""
        size = len(b)
        squares = float((b * (self.xx[:size, :size] @ b)).sum(dtype=np.float64))
        return float(np.sqrt(squares / (self.count * b.shape[1])))

    def error(self, b: Matrix) -> float:
        """The mean of |y - x B|²."""
        fitted = float((b * (self.xx @ b)).sum(dtype=np.float64))
        return (self.yy - 2 * float((b * self.xy).sum(dtype=np.float64)) + fitted) / max(1, self.count)


def moments(x: mx.array, y: mx.array) -> Moments:
    """Those of x [N, D] and y [N, E], summed in float32 where MLX computes."""
    x, y = x.astype(mx.float32), y.astype(mx.float32)
    xx, xy, yy = x.T @ x, x.T @ y, mx.sum(mx.square(y))
    mx.eval(xx, xy, yy)
    return Moments(np.array(xx), np.array(xy), float(yy), len(x))


class _Sum:
    """Moments of pieces, many positions added at once."""

    def __init__(self) -> None:
        self._total: Moments | None = None
        self._waiting: list[tuple[mx.array, mx.array]] = []

    def add(self, x: mx.array, y: mx.array) -> None:
        mx.eval(x, y)
        self._waiting.append((x, y))
        if sum(len(each) for each, _ in self._waiting) >= _POSITIONS:
            self.total()

    def total(self) -> Moments | None:
        if self._waiting:
            xs, ys = zip(*self._waiting, strict=True)
            found = moments(mx.concatenate(list(xs)), mx.concatenate(list(ys)))
            self._total = found if self._total is None else self._total + found
            self._waiting.clear()
        return self._total


def best_map(pieces: Iterable[tuple[mx.array, mx.array]]) -> tuple[Matrix, Moments] | None:
    """The linear map B [D, E] that foretells best, and the moments that it was found by; None without pieces.

    pieces: inputs [n, D] and outputs [n, E] that belong together. The ridge is the one with the least error on the
    pieces that are left out for this.
    """
    learnt, judged = _Sum(), _Sum()
    for number, (x, y) in enumerate(pieces):
        (judged if number % _HELD_OUT == _HELD_OUT - 1 else learnt).add(x, y)
    found = learnt.total()
    if found is None:
        return None
    return min((found.solution(ridge) for ridge in _RIDGES), key=(judged.total() or found).error), found


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
