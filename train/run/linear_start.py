"""Heads that begin as the best linear guess of the target's next state, found in one pass over some of the data."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from eagle_mlx.progress import progress_bar
from eagle_mlx.shards import Sample
from eagle_mlx.target import Target

from ..data import Samples, Tokens
from ..kinds import Head, kind_of
from ..kinds.least_squares import best_map

_TOKENS_PER_INPUT = 32
"""Tokens that are taken for each number that the guess is made of; by the figures in docs/log.md, where it is found."""
_READ_PER_INPUT = 8
"""The same where the target has to read them first. By those figures a quarter gives nine tenths of the guess."""
_SLOW = 2.0
"""Seconds after which a bar is shown."""


def start_linear(head: Head, target: Target, samples: Samples, seed: int) -> None:
    """Give a new head the guess that fits samples best; without any it stays as it is.

    Samples without hidden states are read by the target.
    """
    head.attach(target)
    found = best_map(_pieces(head, target, samples, seed))
    if found is not None:
        kind_of(head).begin_as(head, *found)
        mx.eval(head.parameters())


def _pieces(head: Head, target: Target, samples: Samples, seed: int) -> Iterator[tuple[mx.array, mx.array]]:
    """Of one conversation after the other: what the guess is made of [n, D], and what it is to be [n, H].

    The first token is left out: models keep states there that are unlike all others (Sun et al. 2024, Massive
    Activations in Large Language Models).
    """
    kind = kind_of(head)
    with progress_bar(desc="linear start", unit="token", delay=_SLOW) as bar:
        for number in np.random.default_rng(seed).permutation(len(samples.lengths)):
            sample = samples[int(number)]
            tokens = mx.array(sample.tokens)[None]
            if tokens.size < 3:
                continue
            aux, last = _states(head, target, sample)
            x, y = kind.guess(head, target, head.embed(tokens).astype(mx.float32)[:, 1:], aux, last)
            if not bool(mx.all(mx.isfinite(x)) & mx.all(mx.isfinite(y))):
                continue  # which the first step that reads it will name
            yield x[0, 1:], y[0, 1:]
            bar.total = (_TOKENS_PER_INPUT if isinstance(sample, Sample) else _READ_PER_INPUT) * x.shape[-1]
            bar.update(tokens.size)
            if bar.n >= bar.total:
                return


def _states(head: Head, target: Target, sample: Sample | Tokens) -> tuple[list[mx.array], mx.array]:
    """The aux layers' outputs and the last one's for a conversation, each [1, L, H] float32."""
    layers = kind_of(head).aux_layers_of(head)
    if not isinstance(sample, Sample):
        hidden = target.forward(mx.array(sample.tokens)[None], aux_layers=(*layers, target.num_layers - 1)).aux
        *aux, last = (each.astype(mx.float32) for each in hidden)
        return aux, last
    aux = list(mx.split(mx.array(sample.aux)[None].astype(mx.float32), len(layers), axis=-1)) if layers else []
    return aux, mx.array(sample.last)[None].astype(mx.float32)
