"""What a roll back costs at a short and at a long context: it should be the same."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import mlx.core as mx

from eagle_mlx.cache import RaggedCache

ROWS, LAYERS, HEADS, WIDTH, HEAD_DIM = 4, 14, 8, 5, 128
"""A batch of rows with keys and values in the shape of a large model's; WIDTH tokens a verify."""


@dataclass(frozen=True)
class RollbackCost:
    short_context: int
    long_context: int
    short_ms: float
    """Median milliseconds of a verify's writes and the roll back, all layers."""
    long_ms: float
    ratio: float
    """Median of the ratios long / short, pair by pair."""

    def __str__(self) -> str:
        return (
            f"roll back: {self.short_ms:.2f} ms at {self.short_context} tokens of context, {self.long_ms:.2f} ms at "
            f"{self.long_context}, ratio {self.ratio:.2f}"
        )


def _lengths(context: int) -> list[int]:
    return [context - row for row in range(ROWS)]


def _filled(context: int) -> RaggedCache:
    """A cache whose rows hold about `context` positions, each its own number."""
    cache = RaggedCache(LAYERS, ROWS)
    new = mx.zeros((ROWS, HEADS, context, HEAD_DIM))
    for layer in cache:
        layer.update_and_fetch(new, new)
    cache.lengths.advance(mx.array(_lengths(context), mx.int32), at_most=context)
    cache.lengths.sync(_lengths(context))
    mx.eval(cache.state, cache.lengths.offset)
    return cache


def _round(cache: RaggedCache, new: mx.array, accepted: list[int]) -> float:
    """Seconds for one verify's writes and for giving back what was rejected, row by row."""
    before, context = cache.lengths.save(), cache.lengths.upper
    begin = time.perf_counter()
    for layer in cache:
        layer.update_and_fetch(new, new)
    cache.lengths.advance(mx.array(accepted, mx.int32), at_most=WIDTH)
    mx.eval(cache.state, cache.lengths.offset)
    cache.lengths.sync([a + b for a, b in zip(_lengths(context), accepted, strict=True)])
    seconds = time.perf_counter() - begin
    cache.lengths.restore(before)
    return seconds


def measure_rollback(short: int = 256, long: int = 4096, repeats: int = 60) -> RollbackCost:
    """Time rounds at both contexts in turn, after a warm-up."""
    caches = _filled(short), _filled(long)
    new = mx.random.normal((ROWS, HEADS, WIDTH, HEAD_DIM))
    mx.eval(new)
    pairs = []
    for repeat in range(repeats + 5):
        accepted = [1 + (repeat + i) % WIDTH for i in range(ROWS)]
        pairs.append(tuple(_round(cache, new, accepted) for cache in caches))
    pairs = pairs[5:]
    return RollbackCost(
        short,
        long,
        1e3 * statistics.median(a for a, _ in pairs),
        1e3 * statistics.median(b for _, b in pairs),
        statistics.median(b / a for a, b in pairs),
    )
