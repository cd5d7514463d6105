"""The input of a forward over a chunk of a prompt with images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.vision.spans import ImageSpan


@dataclass(frozen=True)
class ImageInput:
    """The input of a forward over tokens [1, L] of a prompt with images, besides the tokens."""

    tokens: mx.array  # [1, L] int32, 0 for those of images, which have no embeddings of layers either
    embeddings: mx.array  # [1, L, H], in place of the tokens' own
    after_layers: tuple[mx.array, ...] = ()  # what is added to the outputs of the first layers, each [1, L, H]
    positions: tuple[mx.array, ...] = ()  # for M-RoPE: time, row and column, each [1, L] int32

    @classmethod
    def of(
        cls, embed: Callable[[mx.array], mx.array], tokens: mx.array, start: int, images: Sequence[ImageSpan]
    ) -> ImageInput | None:
        """Return the input for the tokens [1, L] from position `start`; None if the tokens say all."""
        end = start + tokens.shape[1]
        here = [span for span in images if span.start < end and span.end > start]
        has_axes = any(span.image.grid is not None for span in images)
        if not here and not has_axes:
            return None
        embeddings, tokens = embed(tokens), mx.array(tokens)
        layers = here[0].image.features.shape[0] - 1 if here else 0
        inputs = [embeddings, *(mx.zeros_like(embeddings) for _ in range(layers))]
        for span in here:
            first, last = max(span.start, start), min(span.end, end)
            part = span.image.features[:, first - span.start : last - span.start].astype(embeddings.dtype)
            tokens[:, first - start : last - start] = 0
            for x, features in zip(inputs, part, strict=True):
                x[:, first - start : last - start] = features
        axes = axes_positions(end, images)[:, start:] if has_axes else ()
        return cls(tokens, inputs[0], tuple(inputs[1:]), tuple(mx.array(axis[None], mx.int32) for axis in axes))


def axes_positions(end: int, images: Sequence[ImageSpan]) -> NDArray[np.int64]:
    """Return [3, end]: the time, row and column of the first positions of a prompt, for M-RoPE.

    For text all three agree, and count from the largest of the image before it (`positions_shift`).
    """
    axes, shift = np.tile(np.arange(end), (3, 1)), 0
    for span in images:
        if span.image.grid is None:
            continue
        rows, columns = span.image.grid
        places = np.arange(rows * columns)
        part = axes[:, span.start : span.end]
        own = np.stack([0 * places, places // columns, places % columns])
        part[:] = span.start + shift + own[:, : part.shape[1]]
        shift += max(rows, columns) - rows * columns
        axes[:, span.end :] = np.arange(span.end, max(span.end, end)) + shift
    return axes
