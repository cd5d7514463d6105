"""The greatest of many numbers, without ordering them all."""

from __future__ import annotations

from math import gcd

import mlx.core as mx

_HEIGHT = 64
"""Most entries of a column. Vocabularies are padded to multiples of 64 or more."""


def largest(x: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` greatest along the last axis and their places, both [..., count], in any order.

    It reads x once, for the greatest of each column. The `count` columns whose greatest are the greatest hold `count`
    entries that no entry of another column exceeds, so what is wanted is in them. Where x has no columns that are short
    and many enough, its entries are partitioned as they are. `count` is at most the length of the axis.
    """
    size = x.shape[-1]
    height = gcd(size, _HEIGHT)
    width = size // height
    if height == 1 or width < 2 * count:
        return _partitioned(x, count)
    columns = x.reshape(*x.shape[:-1], height, width)
    _, best = _partitioned(mx.max(columns, axis=-2), count)
    inside = mx.take_along_axis(columns, best[..., None, :], axis=-1)
    values, at = _partitioned(inside.reshape(*x.shape[:-1], height * count), count)
    return values, at // count * width + mx.take_along_axis(best, at % count, axis=-1)


def _partitioned(x: mx.array, count: int) -> tuple[mx.array, mx.array]:
    size = x.shape[-1]
    if count == size:
        return x, mx.broadcast_to(mx.arange(size, dtype=mx.uint32), x.shape)
    places = mx.argpartition(x, size - count, axis=-1)[..., size - count :]
    return mx.take_along_axis(x, places, axis=-1), places
