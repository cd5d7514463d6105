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
    if not has_columns(x.shape[-1], count):
        return _partitioned(x, count)
    places = best_columns(x, count)
    values, at = _partitioned(mx.take_along_axis(x, places, axis=-1), count)
    return values, mx.take_along_axis(places, at, axis=-1)


def has_columns(size: int, count: int) -> bool:
    """Whether so many entries can be seen as columns that are short, and many enough to leave most of them out."""
    height = gcd(size, _HEIGHT)
    return height > 1 and size // height >= 2 * count


def best_columns(x: mx.array, count: int) -> mx.array:
    """The places [..., m] uint32, in rising order, of all entries of the `count` columns with the greatest of entries.

    Reads x once. It must have columns, as `has_columns` says.
    """
    size = x.shape[-1]
    height = gcd(size, _HEIGHT)
    width = size // height
    tops = mx.max(x.reshape(*x.shape[:-1], height, width), axis=-2)
    best = mx.sort(mx.argpartition(tops, width - count, axis=-1)[..., width - count :], axis=-1)
    rows = mx.arange(0, size, width, dtype=mx.uint32)[:, None]
    return (best[..., None, :] + rows).reshape(*x.shape[:-1], height * count)


def _partitioned(x: mx.array, count: int) -> tuple[mx.array, mx.array]:
    size = x.shape[-1]
    if count == size:
        return x, mx.broadcast_to(mx.arange(size, dtype=mx.uint32), x.shape)
    places = mx.argpartition(x, size - count, axis=-1)[..., size - count :]
    return mx.take_along_axis(x, places, axis=-1), places
