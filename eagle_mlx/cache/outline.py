"""What of a row's caches cannot be put together from pieces, as arrays and numbers that can be written down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.cache.ragged import RaggedCache


def arrays_of(outline: RaggedCache) -> dict[str, mx.array]:
    """The windows and states of an outline (`RaggedCache.outline`), by names that `outline_from` knows."""
    windows = {f"window.{i}.{j}": x for i, window in enumerate(outline.windows) for j, x in enumerate(window.state)}
    states = {
        f"state.{i}.{j}": x
        for i, state in enumerate(outline.recurrent)
        for j, x in enumerate(state.cache)
        if x is not None
    }
    return windows | states


def numbers_of(outline: RaggedCache) -> dict[str, Any]:
    """What else belongs to an outline, as plain values."""
    return {"length": outline.lengths.upper, "displaced": [window._displaced[0] for window in outline.windows]}


def outline_from(
    model: nn.Module, kv_bits: int | None, arrays: Mapping[str, mx.array], numbers: Mapping[str, Any]
) -> RaggedCache:
    """The outline that these came from, of the same model."""
    cache = RaggedCache.of(model, 1, kv_bits)
    cache.lengths.sync([numbers["length"]])
    for i, (window, displaced) in enumerate(zip(cache.windows, numbers["displaced"], strict=True)):
        window.keys, window.values = arrays.get(f"window.{i}.0"), arrays.get(f"window.{i}.1")
        window._displaced = [displaced]
    for i, state in enumerate(cache.recurrent):
        state.cache = [arrays.get(f"state.{i}.{j}") for j in range(len(state.cache))]
    return cache
