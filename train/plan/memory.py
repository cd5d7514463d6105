"""Predict a run's memory and time: a lower bound before the target is loaded, then measurements of a few steps."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from eagle_mlx.cpu import compute_dtype, default_streams, use_shortcuts
from eagle_mlx.data_pipelines import FIRST_ROWS, MakeConfig, steerable
from eagle_mlx.engine import Engine
from eagle_mlx.errors import ConfigError, OutputError
from eagle_mlx.files import free_disk
from eagle_mlx.formats.tensors import arrays_of
from eagle_mlx.hidden_states import in_16_bits
from eagle_mlx.memory import free_memory, gb
from eagle_mlx.progress import tokens_per_second
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import Target, nbytes_of

from ..config import TrainConfig, TrainSettings, flag
from ..data import Rows, capture_rows
from ..kind_settings import KIND_SETTINGS
from ..kinds import KINDS, Head, choose_trained, resolve, trained_size
from ..kinds.least_squares import bytes_of
from ..step import NotFiniteError, Stepper

FLOAT = 4  # bytes of a weight, moment or gradient in float32
PROGRAM = 250_000_000  # bytes used by Python and the libraries, without MLX's arrays
MOST = 0.95  # share of free memory that a run may use


@dataclass(frozen=True)
class Bound:
    """Lower bound of a run's memory and disk, in bytes. Activations come on top; `probe` measures them."""

    given: TrainConfig
    config: TrainSettings
    target: Target  # the target without weights; do not compute with it
    head: Head  # the head without values, in its final shape

    @property
    def weights(self) -> int:
        """Bytes of the target's weights, in the dtype in which this machine computes."""
        dtype = compute_dtype()
        return sum(
            leaf.size * dtype.size if dtype is not None and mx.issubdtype(leaf.dtype, mx.floating) else leaf.nbytes
            for leaf in arrays_of(self.target.model.parameters()).values()
        )

    @property
    def trained(self) -> int:
        return trained_size(self.head)

    @property
    def head_bytes(self) -> int:
        return nbytes_of(self.head)

    @property
    def training(self) -> int:
        """Bytes of the head's weights, gradients and moments, or of its linear start if that takes more."""
        moments, config, start = 2 if self.config.optimization.optimizer == "adamw" else 1, self.config.head, 0
        if config.start == "linear" and not config.init_from:
            width = max(1, len(self.head.named_layers)) * self.target.hidden_size + self.head.hidden_size
            start = bytes_of(width, self.head.hidden_size)
        return self.head_bytes + max((1 + moments) * FLOAT * self.trained, start)

    @property
    def memory(self) -> int:
        return self.weights + self.training + PROGRAM

    @property
    def heads_on_disk(self) -> int:
        """Bytes of `best` and `last`."""
        return 2 * self.head_bytes

    @property
    def checkpoints_on_disk(self) -> int:
        """Bytes of the checkpoints to resume from, including the one being written."""
        return (self.config.run.checkpoints + 1) * 3 * FLOAT * self.trained

    def check(self, free: int | None = None) -> None:
        """Raise ConfigError or OutputError if the disk or `free` bytes, by default the free memory, are too few."""
        free = free_memory() if free is None else free
        if self.memory > MOST * free:
            foreign = KIND_SETTINGS[self.config.head.kind].foreign
            smaller = [] if self.weights + PROGRAM > MOST * free else ["intermediate_size", "draft_vocab"]
            remedies = [f"a smaller {flag(name)}" for name in smaller if name not in foreign]
            raise ConfigError(
                f"this run needs at least {gb(self.memory)} of memory (target {gb(self.weights)}, training "
                f"{gb(self.training)}, program {gb(PROGRAM)}), but {gb(free)} are free; use "
                + " or ".join([*remedies, "a smaller or more strongly quantized --target"])
            )
        needed, folder = self.heads_on_disk + self.checkpoints_on_disk, self.config.run.output
        room = free_disk(folder)
        if needed > room:
            raise OutputError(
                f"{folder} needs {gb(needed)} ({gb(self.heads_on_disk)} of heads, {gb(self.checkpoints_on_disk)} "
                f"of checkpoints), but {gb(room)} are free there; free some space, choose another --output, or "
                "keep fewer --checkpoints"
            )


def bound_of(given: TrainConfig, target: Target | None = None) -> Bound:
    """Resolve a run's settings, and return them with the run's lower bound.

    `target` has no weights; by default, it is created from the headers of its files, which are fetched if necessary.
    Raises ConfigError if the head does not fit the target, TargetError if the target cannot make up the data.
    """
    target = target or given.loading.load(given.head.target, lazy=True)
    config = resolve(given, target.hidden_size)
    kind = KINDS[config.head.kind]
    kind.check(target, config)
    is_made = config.data.is_self or config.optimization.hours or (config.head.adapt and not config.data.replay)
    if is_made and target.tokenizer is not None:
        steerable(target.tokenizer, MakeConfig().domains, target.name)
    head = kind.blank(target, config)
    choose_trained(head, config)
    return Bound(given, config, target, head)


LONG = 1.0  # seconds after which a step is long enough to measure


@dataclass(frozen=True)
class Probe:
    """Measurements of steps on random tokens on this machine."""

    captured: float  # tokens per second that the target reads for hidden states
    learned: float  # tokens per second that a step learns from
    memory: int  # peak bytes of a step, without the target's weights
    written: float = 0.0  # tokens per second that the target writes; measured only for runs with `hours`

    def seconds(self, tokens: int, passes: int, online: bool) -> float:
        """Return the seconds to learn from `tokens` tokens. With `online`, each pass captures hidden states again."""
        return tokens * (passes / self.learned + (passes if online else 1) / self.captured)

    def __str__(self) -> str:
        return (
            f"a step learns from {tokens_per_second(self.learned)} and needs {gb(self.memory)} in addition to the "
            f"target, which reads {tokens_per_second(self.captured)}"
            + (f" and writes {tokens_per_second(self.written)}" if self.written else "")
        )


def probe(target: Target, config: TrainSettings, head: Head | None = None, free: int | None = None) -> Probe:
    """Measure a few steps with a temporary head, which has the shape of a `head` to continue from.

    The number of rows grows until it reaches those computed at once or a step takes a second; the memory for more rows
    is extrapolated. Raises ConfigError, with settings that fit, if that exceeds `free` bytes.
    """
    free = free_memory() if free is None else free
    kind: Any = KINDS[config.head.kind]
    trained = kind.blank(target, config) if head is None else type(head)(head.config, head.token_ids)
    choose_trained(trained, config)
    begin = mx.get_active_memory()
    stepper = Stepper(trained, target, config)
    layers = trained.named_layers

    def read(rows: Rows) -> None:
        mx.eval(capture_rows(target, layers, rows))

    def step(rows: Rows) -> None:
        with contextlib.suppress(NotFiniteError):  # the run reports it in detail
            stepper(rows, 1.0)

    at_once = math.ceil(config.optimization.rows / config.optimization.accumulate)
    count = min(at_once, default_streams())
    while True:
        part = _random_rows(target, config, count)
        reading_peak, reading = _measured(partial(read, part), begin)
        part = replace(part, states=np.array(in_16_bits(capture_rows(target, layers, part))))
        taken, learning = _measured(partial(step, part), begin)
        fixed = min(taken, mx.get_active_memory() - begin + FLOAT * trained_size(trained))
        by_row = max(0, taken - fixed) // count
        check_memory(config, fixed, by_row, free)
        if count == at_once or learning > LONG:
            break
        count = min(at_once, 2 * count)
    written = _written(target) if config.optimization.hours else 0.0
    mx.clear_cache()
    mx.reset_peak_memory()
    tokens = count * config.optimization.length
    return Probe(tokens / reading, tokens / learning, max(reading_peak, fixed + at_once * by_row), written)


def check_memory(config: TrainSettings, fixed: int, by_row: int, free: int) -> None:
    """Raise ConfigError, with settings that fit, if a step's `fixed` bytes and those `by_row` exceed `free` bytes."""
    step = config.optimization
    needed = fixed + math.ceil(step.rows / step.accumulate) * by_row
    room = int(MOST * free)
    if needed <= room:
        return
    advice = []
    if fixed + by_row <= room:
        advice.append(f"--accumulate {math.ceil(step.rows / ((room - fixed) // by_row))}")
    if not step.grad_checkpoint:
        advice.append("--grad-checkpoint")
    advice += ["a shorter --length", "a smaller --unroll"]
    if "draft_vocab" not in KIND_SETTINGS[config.head.kind].foreign:
        advice.append("a smaller --draft-vocab")
    raise ConfigError(
        f"a step of this run needs {gb(needed)} in addition to the target, but {gb(free)} are free; use "
        f"{' or '.join(advice)}"
    )


def _measured(work: Callable[[], object], begin: int) -> tuple[int, float]:
    """Return the peak of MLX's memory above `begin` bytes, and the seconds for `work`."""
    mx.reset_peak_memory()
    for _ in range(2):
        since = time.perf_counter()
        work()
        seconds = time.perf_counter() - since
        if seconds > LONG and use_shortcuts():  # otherwise, the first call compiles
            break
    return max(0, mx.get_peak_memory() - begin), seconds


def _written(target: Target) -> float:
    """Return the tokens per second that the target writes in the first batch of conversations."""
    prompts = np.random.default_rng(0).integers(0, target.vocab_size, (FIRST_ROWS, 8)).tolist()
    counts: list[int] = []

    def write() -> None:
        outputs = Engine(target, max_batch=FIRST_ROWS).generate(prompts, SamplingParams(max_tokens=16))
        counts.append(sum(len(output.tokens) for output in outputs))

    _, seconds = _measured(write, 0)
    return counts[-1] / seconds


def _random_rows(target: Target, config: TrainSettings, count: int) -> Rows:
    """Return `count` rows of the run's length, in which every token is learned."""
    shape = (count, config.optimization.length)
    most = min(config.data.max_length, target.context_length)
    segments = np.broadcast_to(np.arange(shape[1], dtype=np.int32) // most + 1, shape)
    tokens = np.random.default_rng(0).integers(0, target.vocab_size, shape).astype(np.int32)
    return Rows(tokens, np.ones(shape, np.uint8), np.ascontiguousarray(segments), None)
