"""The beginning of a run, before its first step: the head, the other processes, and what writes to its folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from eagle_mlx.command import Stop, Stopped
from eagle_mlx.errors import ConfigError, DataError, EagleError, HeadError
from eagle_mlx.formats.tensors import weights_of
from eagle_mlx.heads import kind_of as head_kind
from eagle_mlx.heads import load_head
from eagle_mlx.hidden_states import Example, features_of, from_16_bits, last_of, read_states
from eagle_mlx.progress import progress_bar
from eagle_mlx.setting import find
from eagle_mlx.target import Target, digest_of, fingerprint

from ..adaptation import Adaptation
from ..config import TrainConfig, TrainSettings, flag
from ..data import Batches, Examples, TrainData
from ..distributed import SINGLE_PROCESS, World
from ..kinds import KINDS, Head, choose_trained, kind_of
from ..kinds.base import Kept, projection
from ..kinds.least_squares import Piece, best_map
from ..step import Stepper
from . import state
from .folder import Identity, check_incomplete, check_same, claim, explained, write_identity
from .state import RunCheckpoint, Stopwatch
from .tracker import Tracker

_DRAFT_ROWS = ("lm_head.weight", "markov_head.markov_w2.weight")
"""Weights that have a row for each token of the draft vocabulary."""
_PIECES = 20  # parts of a vocabulary, of which two choose the ridge of the least squares
_TOKENS_PER_INPUT = 32  # tokens per input value of the linear start, if states are captured (docs/decisions.md)
_READ_PER_INPUT = 8  # the same if the target must compute the states: a quarter gives nine tenths of the gain


def existing_head(target: Target, config: TrainSettings) -> Head | None:
    """Return the head named by `config.head.init_from`, ready for training in float32, or None.

    It gets more layers if it has fewer than the settings say. Raises ConfigError if kind or shape contradict the
    settings, and the errors of loading.
    """
    if not config.head.init_from:
        return None
    try:
        loaded: Any = load_head(config.head.init_from, target)
    except HeadError as e:
        raise HeadError(f"{e} Name its target, or train a new head") from e
    kind = kind_of(loaded)
    if kind.name != config.head.kind:
        raise ConfigError(
            f"{config.head.init_from} is {head_kind(loaded).one_head}; continue it with --head {kind.name}"
        )
    for name, has in kind.mismatches(loaded, config).items():
        wanted = config.value(name)
        if wanted not in (find(TrainConfig, name).default, has):
            raise ConfigError(
                f"{flag(name)} is {_text(wanted)}, but {config.head.init_from} has {_text(has)}; "
                f"leave {flag(name)} out, or start without --init-from"
            )
    if (config.head.window or loaded.draft_window) and any(getattr(loaded.config, "windows", ())):
        raise ConfigError(f"--window cannot be used with {config.head.init_from}: its layers have windows of their own")
    return to_train(loaded, target, config)


def to_train(loaded: Head, target: Target, config: TrainSettings) -> Head:
    """Return a loaded head, which nothing else may use, ready for training in float32."""
    head: Head = kind_of(loaded).adopt(loaded, config.head.layers or 0, config.run.seed)
    head.draft_window = config.head.window or loaded.draft_window
    head.set_dtype(mx.float32)
    head.attach(target)
    choose_trained(head, config)
    mx.eval(head.parameters())
    return head


def with_vocabulary(head: Head, target: Target, kept: Kept, config: TrainSettings) -> Head:
    """Return the head with the draft vocabulary `kept`.

    Tokens that it drafts already keep their rows of weights. Rows of new tokens are predicted from those of the
    target's output projection, by least squares over all tokens that it drafts already.
    """
    every = np.arange(target.vocab_size)
    old = every if head.token_ids is None else np.array(head.token_ids, np.int64)
    new = every if kept is None else kept
    if np.array_equal(old, new):
        return head
    place = np.minimum(np.searchsorted(old, new), len(old) - 1)
    had = mx.array(old[place] == new)[:, None]
    rows = mx.pad(projection(target), [(0, 0), (0, 1)], constant_values=1.0)  # with a constant
    weights = weights_of(head)
    for name in weights.keys() & set(_DRAFT_ROWS):
        pieces = [np.arange(first, len(old), _PIECES) for first in range(min(_PIECES, len(old)))]
        fit = best_map((rows[mx.array(old[at])], weights[name][mx.array(at)]) for at in pieces)
        assert fit is not None, "a draft vocabulary has tokens"
        guess = rows[mx.array(new)] @ mx.array(fit[0])
        weights[name] = mx.where(had, weights[name][mx.array(place)], guess)
    token_ids = None if kept is None else mx.array(kept, mx.int32)
    changed: Head = type(head)(replace(head.config, draft_vocab_size=len(new)), token_ids)
    changed.load_weights(list(weights.items()))
    changed.attach(target)
    changed.draft_window = head.draft_window
    choose_trained(changed, config)
    mx.eval(changed.parameters())
    return changed


def new_head(target: Target, data: TrainData, config: TrainSettings, begin: bool = True) -> Head:
    """Return a new head for the data. It is random if `begin` is false, else initialized by `config.head.start`."""
    head: Head = KINDS[config.head.kind].new(target, config, data.kept, data.aux_layers)
    head.draft_window = config.head.window
    if begin and config.head.start == "linear":
        head.attach(target)
        if (fit := best_map(_pieces(head, target, data.samples, config.run.seed))) is not None:
            kind_of(head).begin_as(head, *fit)
            mx.eval(head.parameters())
    return head


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _pieces(head: Head, target: Target, samples: Examples, seed: int) -> Iterator[Piece]:
    """Yield inputs [n, D] and desired outputs [n, H] of the linear map for each conversation.

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


class Workers:
    """Rank 0's control of the other processes. A single process has none."""

    def __init__(self, world: World, stop: Stop):
        self.world, self._stop = world, stop
        self._ended = world.size == 1

    def step(self, epoch: int, batch: int, factor: float) -> None:
        """Have all workers take a step on their part of a batch. Raises Stopped if any process was asked to stop."""
        if self._ended:
            return
        if self.world.any(self._stop.asked):
            self._ended = True
            raise Stopped
        self.world.broadcast([epoch, batch, factor])

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            with contextlib.suppress(EagleError):  # they have already ended
                self.world.any(True)


def run_worker(
    target: Target, data: TrainData, config: TrainSettings, head: Head | None, world: World, stop: Stop
) -> None:
    """Train together with rank 0 until it ends the run. Only rank 0 evaluates, saves and writes."""
    if head is None:
        head = new_head(target, data, config, begin=False)  # rank 0 sends its weights before the first step
    else:
        head = with_vocabulary(head, target, data.kept, config)
    with stop.deferred():
        step = config.optimization
        batches = Batches(data.samples, step.rows, step.length, config.run.seed, world)
        stepper = Stepper(head, target, config, world)
        stepper.sync()
        position, stream = (0, 0), batches.epoch(0)
        try:
            while not world.any(stop.asked):
                epoch, batch, factor = world.broadcast()
                if position != (epoch, batch):
                    stream.close()
                    stream = batches.epoch(epoch, batch)
                stepper(next(stream), factor)
                position = (epoch, batch + 1)
        finally:
            stream.close()


@dataclass(frozen=True)
class Setup:
    """The parts of a run before its first data."""

    target: Target
    config: TrainSettings
    head: Head | None  # the head to continue from
    folder: Path
    tracker: Tracker
    stop: Stop
    workers: Workers
    watch: Stopwatch
    saved: RunCheckpoint | None  # the state of an interrupted run, which continues
    adaptation: Adaptation | None = None  # if the run adapts a head, which the result must beat

    def batches(self, data: TrainData) -> Batches:
        """Return the batches of this data. Raises DataError if there are none."""
        step = self.config.optimization
        batches = Batches(data.samples, step.rows, step.length, self.config.run.seed, self.workers.world)
        if not batches.steps_per_epoch():
            raise DataError("no conversation is long enough to learn from; check the data")
        return batches


@contextlib.contextmanager
def set_up(
    target: Target,
    config: TrainSettings,
    data: str,
    head: Head | None = None,
    resume: Path | None = None,
    stop: Stop | None = None,
    world: World = SINGLE_PROCESS,
    watch: Stopwatch | None = None,
    claimed: Path | None = None,
    adaptation: Adaptation | None = None,
) -> Iterator[Setup]:
    """Yield what a run needs that writes to `config.run.output`.

    `data`: its fingerprint. `head`: to continue from. `resume`: folder of an interrupted run, which continues from its
    newest intact state as if it had never stopped. `watch`: the run's stopwatch. `claimed`: the folder, if the caller
    has already created and locked it (`claim`).

    Raises OutputError if the folder exists or cannot be written; ConfigError if a resumed run has another target or
    other data; CheckpointError if it is complete. In a `world`, rank 0 calls this, and the others `run_worker`.
    """
    stop = stop or Stop()
    check_incomplete(resume)
    place = contextlib.nullcontext(claimed) if claimed else claim(config.run.output, config.run.overwrite, resume)
    with stop.listening(), place as folder, explained(config.run.output, folder):
        adapted = digest_of(head) if head is not None and (config.head.lora_rank or adaptation) else ""
        identity = Identity(config, fingerprint(target), data, world.size, adapted)
        if resume:
            check_same(folder, identity)
        write_identity(folder, identity)
        saved = state.newest(folder, tqdm.write) if resume else None
        tracking = Tracker(folder, config, saved.state.progress.step if saved else None)
        with tracking as tracker, contextlib.closing(Workers(world, stop)) as workers:
            yield Setup(target, config, head, folder, tracker, stop, workers, watch or Stopwatch(), saved, adaptation)
