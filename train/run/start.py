"""The head that training starts from: an existing one, or a new one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.errors import ConfigError
from eagle_mlx.formats.tensors import weights_of
from eagle_mlx.heads import kind_of as known_kind
from eagle_mlx.heads import load_head
from eagle_mlx.hidden_states import Example, features_of, from_16_bits, last_of, read_states
from eagle_mlx.progress import progress_bar
from eagle_mlx.setting import find
from eagle_mlx.target import Target

from ..config import TrainConfig, TrainSettings, flag
from ..data import Examples, TrainData
from ..kinds import KINDS, Head, choose_trained, kind_of
from ..kinds.base import projection
from ..kinds.least_squares import best_map


def existing_head(target: Target, config: TrainSettings) -> Head | None:
    """Return the head named by `config.head.init_from`, ready for training, or None.

    Weights are converted to float32. A head gets more layers if it has fewer than asked for. Its own embedding is not
    trained, as in other trainers; with a rank, only low-rank additions are. Raises ConfigError if kind or shape
    contradict the settings, and the errors of loading.
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
        if asked not in (find(TrainConfig, name).default, has):
            raise ConfigError(
                f"{flag(name)} is {_text(asked)}, but {config.head.init_from} has {_text(has)}; "
                f"leave {flag(name)} out, or start without --init-from"
            )
    head: Head = kind.adopt(loaded, config.head.layers or 0, config.run.seed)
    head.set_dtype(mx.float32)
    head.attach(target)
    choose_trained(head, config)
    mx.eval(head.parameters())
    return head


_DRAFT_ROWS = ("lm_head.weight", "markov_head.markov_w2.weight")
"""Weights that have a row for each token of the draft vocabulary."""


def with_vocabulary(head: Head, target: Target, kept: NDArray[np.int64] | None, config: TrainSettings) -> Head:
    """Return the head with the draft vocabulary `kept` [Vd], the target's ids, ascending; None for all.

    Tokens that it drafts already keep their rows of weights. Rows of new tokens are predicted from those of the
    target's output projection, by least squares over all tokens that it drafts already.
    """
    every = np.arange(target.vocab_size)
    old = every if head.token_ids is None else np.array(head.token_ids, np.int64)
    new = every if kept is None else kept
    if np.array_equal(old, new):
        return head
    place = np.minimum(np.searchsorted(old, new), len(old) - 1)
    known = mx.array(old[place] == new)[:, None]
    rows = mx.pad(projection(target), [(0, 0), (0, 1)], constant_values=1.0)  # with a constant
    weights = weights_of(head)
    for name in weights.keys() & set(_DRAFT_ROWS):
        pieces = [np.arange(first, len(old), _PIECES) for first in range(min(_PIECES, len(old)))]
        found = best_map((rows[mx.array(old[at])], weights[name][mx.array(at)]) for at in pieces)
        assert found is not None, "a draft vocabulary has tokens"
        guess = rows[mx.array(new)] @ mx.array(found[0])
        weights[name] = mx.where(known, weights[name][mx.array(place)], guess)
    d2t = None if kept is None else mx.array(kept - np.arange(len(kept)), mx.int32)
    changed: Head = kind_of(head).made(replace(head.config, draft_vocab_size=len(new)), d2t)
    changed.load_weights(list(weights.items()))
    changed.attach(target)
    choose_trained(changed, config)
    mx.eval(changed.parameters())
    return changed


_PIECES = 20  # parts of a vocabulary, of which two choose the ridge of the least squares


def new_head(target: Target, data: TrainData, config: TrainSettings, begin: bool = True) -> Head:
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
            x, y = kind.guess(head, head.embed(tokens).astype(mx.float32)[:, 1:], aux, last)
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
        whole = from_16_bits(example.states.whole)[None]
    whole = whole.astype(mx.float32)
    return list(mx.split(features_of(whole, size), len(layers), axis=-1)) if layers else [], last_of(whole, size)
