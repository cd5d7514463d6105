"""Capture: the target's hidden states over rendered conversations, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

import mlx.core as mx
import numpy as np

from eagle_mlx.cpu import default_streams, make_streams, one_blas_thread
from eagle_mlx.errors import TargetError
from eagle_mlx.memory import FreedBuffers
from eagle_mlx.progress import progress_bar
from eagle_mlx.shards import Sample
from eagle_mlx.target import Target

TokensAndMask = tuple[Sequence[int], Sequence[int]]
"""Tokens and loss mask of one conversation."""

WINDOW = 512
"""Conversations sorted by length at a time."""


def capture(
    target: Target,
    aux_layers: Sequence[int],
    samples: Iterable[TokensAndMask],
    batch_tokens: int = 2048,
    progress: bool = False,
) -> Iterator[Sample]:
    """Yield each conversation with the outputs of `aux_layers` and of the last layer (before the final norm).

    Conversations of like length go through the target together, right-padded and without a cache, `batch_tokens`
    tokens at a time, so they do not come in the order in which they were given. The hidden states are copied out as
    float16, clipped to its range. Nothing is kept once it is yielded.
    """
    total = sum(len(tokens) for tokens, _ in samples) if isinstance(samples, Sequence) else None
    with progress_bar(total=total, desc="capture", unit="token", unit_scale=True, disable=not progress) as bar:
        for sample in capture_batches(target, aux_layers, make_batches(samples, batch_tokens)):
            yield sample
            bar.update(len(sample.tokens))


def capture_batches(
    target: Target, aux_layers: Sequence[int], batches: Iterable[list[TokensAndMask]]
) -> Iterator[Sample]:
    """`capture` of batches already made, in their order. A batch comes out the same whatever goes before and after it.

    Raises TargetError where the target's hidden states are no numbers.
    """
    layers = (*aux_layers, target.num_layers - 1)
    split = target.hidden_size * len(aux_layers)
    streams = make_streams(default_streams())
    for group in _groups(iter(batches), len(streams)):
        hidden = _hidden_states(target, layers, group, streams)
        for (tokens, mask), states in zip(chain.from_iterable(group), chain.from_iterable(hidden), strict=True):
            states = states[: len(tokens)]
            if np.isnan(states).any():
                raise TargetError(
                    f"{target.name} gives hidden states that are no numbers, for a conversation of {len(tokens)} "
                    "tokens; its weights are damaged, or its type is too narrow for it: load it in float32"
                )
            aux, last = states[:, :split].copy(), states[:, split:].copy()
            yield Sample(np.array(tokens, np.int32), np.array(mask, np.uint8), aux, last)


def make_batches(samples: Iterable[TokensAndMask], batch_tokens: int) -> Iterator[list[TokensAndMask]]:
    """Batches of like length, each of at most `batch_tokens` tokens with its padding, or of one conversation."""
    remaining = iter(samples)
    while window := sorted(islice(remaining, WINDOW), key=lambda s: len(s[0])):
        batch: list[TokensAndMask] = []
        for sample in window:
            if batch and (len(batch) + 1) * len(sample[0]) > batch_tokens:
                yield batch
                batch = []
            batch.append(sample)
        yield batch


def _groups(batches: Iterator[list[TokensAndMask]], size: int) -> Iterator[list[list[TokensAndMask]]]:
    while group := list(islice(batches, size)):
        yield group


def _hidden_states(
    target: Target, layers: Sequence[int], group: Sequence[list[TokensAndMask]], streams: Sequence[mx.Stream]
) -> list[np.ndarray]:
    """Hidden states of n layers side by side, float16 [B, L, n * H], for each batch; one stream for each."""
    limit = float(np.finfo(np.float16).max)
    states = []
    for batch, stream in zip(group, streams, strict=False):
        padded = np.zeros((len(batch), max(len(tokens) for tokens, _ in batch)), np.int32)
        for row, (tokens, _) in enumerate(batch):
            padded[row, : len(tokens)] = tokens
        with mx.stream(stream):
            hidden = mx.concatenate(list(target.forward(mx.array(padded), aux_layers=layers).aux), axis=-1)
            states.append(mx.clip(hidden, -limit, limit).astype(mx.float16))
    with one_blas_thread(len(streams) > 1):
        mx.eval(states)
    found = [np.array(state) for state in states]
    del hidden, states
    FreedBuffers().after_chunk()
    return found
