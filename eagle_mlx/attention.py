"""Attention over tiles of a prompt's queries, on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from eagle_mlx.cpu import softmax, use_shortcuts

_LEAST = 65  # queries of a prompt; forwards with fewer may be verifies, for which attention is little of the work
_TILE = 128
"""Queries of a prompt that attend together on a CPU, only to earlier keys. Otherwise MLX computes all scores there, and
their exponentials take most of the time (benchmarks/results/prompt-tiles.yaml). Smaller tiles cost more in overhead."""


def tiled(attention: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return mlx-lm's `scaled_dot_product_attention`, with prompts processed in tiles of queries."""

    def attend(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
    ) -> mx.array:
        length, plain = queries.shape[2], sinks is None and not hasattr(cache, "bits")
        if plain and length >= _LEAST and _is_causal(cache, keys, mask, length):
            return _in_tiles(queries, keys, values, scale, mask)
        return attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    return attend


def _is_causal(cache: Any, keys: mx.array, mask: Any, length: int) -> bool:
    """Return whether, on a CPU, key s is at position s, so that query i sees no key after `past + i`.

    That holds in this library's caches unless a ring has wrapped, when there are fewer keys than positions; and without
    a cache, for mlx-lm's mask "causal".
    """
    if not (mx.default_device() == mx.cpu and use_shortcuts()):
        return False
    if not isinstance(mask, mx.array):
        return mask == "causal" and cache is None and keys.shape[2] == length
    lengths = getattr(cache, "lengths", None)
    is_whole = mask.dtype == mx.bool_ and mask.ndim == 4 and mask.shape[-2:] == (length, keys.shape[2])
    if not is_whole or lengths is None or lengths.branches is not None or lengths.blocks:
        return False
    return bool(lengths.upper + length == keys.shape[2])


def _in_tiles(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str) -> mx.array:
    """Compute a prompt's causal attention on a CPU, one tile of queries at a time.

    queries: [B, heads, L, D]; keys, values: [B, key heads, T, D]; mask: [B or 1, 1 or heads, L, T] bool, or "causal".
    """
    rows, heads, length, width = queries.shape
    if isinstance(mask, str):
        mask = mx.tril(mx.ones((length, length), mx.bool_))
    sharing, past, parts = heads // keys.shape[1], keys.shape[2] - length, []
    for start in range(0, length, _TILE):
        end = min(start + _TILE, length)
        some = (queries[:, :, start:end] * scale).reshape(rows, -1, sharing * (end - start), width)
        scores = some @ keys[:, :, : past + end].swapaxes(-1, -2)
        split = scores.reshape(rows, heads, end - start, past + end)
        weights = softmax(mx.where(mask[..., start:end, : past + end], split, -math.inf))
        out = weights.reshape(scores.shape) @ values[:, :, : past + end]
        parts.append(out.reshape(rows, heads, end - start, values.shape[-1]))
    return mx.concatenate(parts, axis=2)
