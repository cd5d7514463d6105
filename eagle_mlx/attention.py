"""Attention over slices of the queries: of a verify, for Metal's kernel for few queries; of a prompt, on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from eagle_mlx.cpu import fastmath, use_shortcuts

MOST_QUERIES = 8
_MOST_HEADS = 32
"""Queries times heads that share keys. Both limits are those of Metal's kernel (mlx, backend/metal,
scaled_dot_product_attention.cpp, `use_fallback`)."""
_LONG_KERNEL = (64, 80, 128)  # head widths for which Metal has a kernel for more queries
_LONG_KERNEL_FROM = 17
"""Queries from which that kernel is faster than slices: 12 to 48 queries take it 2.3 times as long as 8 take the other
kernel, with 16,384 keys of width 128 on an M5 Max (mlx#3826)."""
_LONGEST_VERIFY = 64  # forwards with more queries are prompts, for which attention scores are little of the work
_TILE = 128
"""Queries of a prompt that attend together on a CPU, only to earlier keys. Otherwise MLX computes all scores there, and
their exponentials take most of the time (benchmarks/results/prompt-tiles.yaml). Smaller tiles cost more in overhead."""


def queries_at_once(length: int, sharing: int, width: int) -> int:
    """Return how many of `length` queries one call should take, with `sharing` heads per key head of size `width`."""
    if length == 1 or length > _LONGEST_VERIFY or (length >= _LONG_KERNEL_FROM and width in _LONG_KERNEL):
        return length
    return min(length, MOST_QUERIES, max(1, _MOST_HEADS // sharing))


def sliced(attention: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return mlx-lm's `scaled_dot_product_attention`, with a verify's queries in slices that fit the fused kernel.

    Otherwise the scores of all heads are written to memory and read again. Values do not change.
    """

    def attend(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
    ) -> mx.array:
        # queries: [B, heads, L, D]; keys, values: [B, key heads, T, D]; mask: [..., L, T], "causal" or None
        length = queries.shape[2]
        quantized = hasattr(cache, "bits")
        most = length if quantized else queries_at_once(length, queries.shape[1] // keys.shape[1], queries.shape[3])
        if most >= length:
            return attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        past, parts = keys.shape[2] - length, []
        for start in range(0, length, most):
            end = min(start + most, length)
            seen = past + end if isinstance(mask, str) else keys.shape[2]  # "causal" counts from the last key
            part = mask[..., start:end, :] if isinstance(mask, mx.array) and mask.shape[-2] == length else mask
            some = queries[:, :, start:end], keys[:, :, :seen], values[:, :, :seen]
            parts.append(attention(*some, cache=cache, scale=scale, mask=part, sinks=sinks))
        return mx.concatenate(parts, axis=2)

    return attend


def tiled(attention: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return mlx-lm's `scaled_dot_product_attention`, with prompts processed in tiles of queries."""

    def attend(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
    ) -> mx.array:
        length, plain = queries.shape[2], sinks is None and not hasattr(cache, "bits")
        if plain and length > _LONGEST_VERIFY and _is_causal(cache, keys, mask, length):
            return _in_tiles(queries, keys, values, scale, mask)
        return attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    return attend


def _is_causal(cache: Any, keys: mx.array, mask: Any, length: int) -> bool:
    """Return whether, on a CPU, key s is at position s, so that query i sees no key after `past + i`.

    That holds in this library's caches unless a ring has wrapped, when there are fewer keys than positions.
    """
    if not (mx.default_device() == mx.cpu and use_shortcuts() and isinstance(mask, mx.array)):
        return False
    lengths = getattr(cache, "lengths", None)
    is_whole = mask.dtype == mx.bool_ and mask.ndim == 4 and mask.shape[-2:] == (length, keys.shape[2])
    return is_whole and lengths is not None and lengths.branches is None and lengths.upper + length == keys.shape[2]


def _in_tiles(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array) -> mx.array:
    """Compute a prompt's causal attention on a CPU, one tile of queries at a time.

    queries: [B, heads, L, D]; keys, values: [B, key heads, T, D]; mask: [B or 1, 1 or heads, L, T] bool.
    """
    rows, heads, length, width = queries.shape
    sharing, past, parts = heads // keys.shape[1], keys.shape[2] - length, []
    for start in range(0, length, _TILE):
        end = min(start + _TILE, length)
        some = (queries[:, :, start:end] * scale).reshape(rows, -1, sharing * (end - start), width)
        scores = some @ keys[:, :, : past + end].swapaxes(-1, -2)
        split = scores.reshape(rows, heads, end - start, past + end)
        weights = fastmath.softmax(mx.where(mask[..., start:end, : past + end], split, -math.inf))
        out = weights.reshape(scores.shape) @ values[:, :, : past + end]
        parts.append(out.reshape(rows, heads, end - start, values.shape[-1]))
    return mx.concatenate(parts, axis=2)
