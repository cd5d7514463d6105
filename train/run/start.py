"""The head that training starts from: an existing one, or a new one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from eagle_mlx.errors import ConfigError
from eagle_mlx.heads import kind_of as known_kind
from eagle_mlx.heads import load_head
from eagle_mlx.hidden_states import Example, features_of, last_of, read_states
from eagle_mlx.progress import progress_bar
from eagle_mlx.target import Target

from ..config import TrainConfig, flag
from ..data import Examples, TrainData
from ..kinds import KINDS, OPEN, Head, choose_trained, kind_of
from ..kinds.least_squares import best_map


def existing_head(target: Target, config: TrainConfig) -> Head | None:
    """Return the head named by `config.head.init_from`, ready for training, or None.

    Weights are converted to float32. The head's own embedding is not trained, as in other trainers; with a rank, only
    low-rank additions are. Raises ConfigError if kind or shape contradict the settings, and the errors of loading.
    """
    if not config.head.init_from:
        return None
    loaded: Any = load_head(config.head.init_from, target)
    kind = kind_of(loaded)
    if kind.name != config.head.kind:
        one = known_kind(loaded).one_head
        raise ConfigError(f"{config.head.init_from} is {one}; continue it with --head {kind.name}")
    for name, has in kind.mismatches(loaded, config).items():
        asked = config.value(name)
        if asked not in (OPEN[name], has):
            raise ConfigError(
                f"{flag(name)} is {_text(asked)}, but {config.head.init_from} has {_text(has)}; "
                f"leave {flag(name)} out, or start without --init-from"
            )
    head: Head = kind.adopt(loaded)
    head.set_dtype(mx.float32)
    head.attach(target)
    choose_trained(head, config)
    mx.eval(head.parameters())
    return head


def new_head(target: Target, data: TrainData, config: TrainConfig, begin: bool = True) -> Head:
    """Return a new head for the data. It is random if `begin` is false, else initialized by `config.head.start`."""
    head: Head = KINDS[config.head.kind].new(target, config, data.kept, data.aux_layers)
    if begin and config.head.start == "linear":
        start_linear(head, target, data.samples, config.run.seed)
    return head


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


_TOKENS_PER_INPUT = 32
"""Tokens per input value of the linear start, if hidden states are captured (figures: docs/decisions.md)."""
_READ_PER_INPUT = 8
"""The same if the target must compute the states first. By those figures, a quarter gives nine tenths of the gain."""


def start_linear(head: Head, target: Target, samples: Examples, seed: int) -> None:
    """Initialize a new head with the best linear map for the samples; without samples, leave it unchanged.

    The target computes missing hidden states.
    """
    head.attach(target)
    found = best_map(_pieces(head, target, samples, seed))
    if found is not None:
        kind_of(head).begin_as(head, *found)
        mx.eval(head.parameters())


def _pieces(head: Head, target: Target, samples: Examples, seed: int) -> Iterator[tuple[mx.array, mx.array]]:
    """Yield inputs [n, D] and desired outputs [n, H] of the linear map, one conversation at a time.

    The first token is left out because its hidden states are unlike all others (Sun et al. 2024, Massive Activations in
    Large Language Models).
    """
    kind = kind_of(head)
    with progress_bar(desc="linear start", unit="token", delay=2.0) as bar:
        for number in np.random.default_rng(seed).permutation(len(samples.lengths)):
            sample = samples[int(number)]
            tokens = mx.array(sample.tokens)[None]
            if tokens.size < 3:
                continue
            aux, last = _states(head, target, sample)
            x, y = kind.guess(head, target, head.embed(tokens).astype(mx.float32)[:, 1:], aux, last)
            if not bool(mx.all(mx.isfinite(x)) & mx.all(mx.isfinite(y))):
                continue  # the first step that reads it will report it
            yield x[0, 1:], y[0, 1:]
            bar.total = (_TOKENS_PER_INPUT if sample.states is not None else _READ_PER_INPUT) * x.shape[-1]
            bar.update(tokens.size)
            if bar.n >= bar.total:
                return


def _states(head: Head, target: Target, example: Example) -> tuple[list[mx.array], mx.array]:
    """Return the outputs of the aux layers and of the last layer for a conversation, each [1, L, H] float32."""
    layers, size = head.named_layers, target.hidden_size
    if example.states is None:
        whole = read_states(target, mx.array(example.tokens)[None], layers)
    else:
        whole = mx.array(example.states.whole)[None]
    whole = whole.astype(mx.float32)
    return list(mx.split(features_of(whole, size), len(layers), axis=-1)) if layers else [], last_of(whole, size)
