"""A mode of decoding, its result for a prompt, and the comparison of two modes' tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf
from time import perf_counter

import mlx.core as mx
import numpy as np

from eagle_mlx import Output, SamplingParams, Target
from eagle_mlx.decoding.sampling import SamplingBatch, gumbel

from ..speculation import PolicyName
from .options import ModeName

Decoding = Generator[int, None, list[Output]]
"""Yields the number of new tokens after every step; returns the output of each prompt."""


def acceptance_length(outputs: Sequence[Output]) -> float:
    """Return τ over all outputs: tokens emitted per target forward, bonus tokens included."""
    return sum(len(one.tokens) for one in outputs) / max(1, sum(one.rounds for one in outputs))


def acceptance_by_position(outputs: Sequence[Output]) -> list[float]:
    """For each draft position, return the share of rounds that accepted it among those that drafted it."""
    drafted = map(sum, zip_longest(*(one.drafted_by_position for one in outputs), fillvalue=0))
    accepted = map(sum, zip_longest(*(one.accepted_by_position for one in outputs), fillvalue=0))
    return [hits / count for hits, count in zip_longest(accepted, drafted, fillvalue=0) if count]


def acceptance_rate(outputs: Sequence[Output]) -> float | None:
    """Return the share of draft tokens that were accepted; None if none were drafted."""
    drafted = sum(one.drafted for one in outputs)
    return sum(one.accepted for one in outputs) / drafted if drafted else None


class Mode(ABC):
    """A way of decoding."""

    name: ModeName
    model: str
    """The model that decodes, and the library that loaded it if that is not EAGLE-MLX."""
    dtype: mx.Dtype
    batch = 1
    depth = 0
    nodes = 0
    """Tokens of a draft tree; 0 for chains."""
    policy: PolicyName = "fixed"
    weights = 0
    """Bytes of the weights of the models that this mode uses."""
    held = 0
    """Bytes that this mode keeps between its turns, without weights."""

    @abstractmethod
    def decode(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Decoding:
        """Decode token-id prompts to their ends. Outputs are in the order of the prompts."""

    def sync(self) -> None:
        """Wait for dispatched work that is no longer needed, so that it does not slow the next timing."""
        mx.synchronize()


Watch = Callable[[Mode, int], None]
"""Called before each turn and after each step, with the number of new tokens so far."""


@dataclass
class Timed:
    """A mode's decoding of some prompts, its time and memory so far, and its outputs."""

    mode: Mode
    decoding: Decoding
    watch: Watch
    seconds: float = 0.0
    tokens: int = 0
    peak: int = 0
    """The most bytes that MLX used at a time for this mode, without what other modes hold."""
    is_done: bool = False
    outputs: list[Output] = field(default_factory=list)

    def run(self, goal: float) -> None:
        """Continue until `goal` tokens are generated, or to the end."""
        self.watch(self.mode, self.tokens)
        mx.clear_cache()  # start without another mode's buffers
        mx.reset_peak_memory()
        before, start = mx.get_active_memory(), perf_counter()
        try:
            while self.tokens < goal:
                self.tokens += next(self.decoding)
                self.watch(self.mode, self.tokens)
            self.mode.sync()  # wait for dispatched work, which counts toward this turn
            self.seconds += perf_counter() - start
        except StopIteration as end:
            self.seconds += perf_counter() - start
            self.mode.sync()
            self.outputs, self.is_done = end.value, True
        self.peak = max(self.peak, self.mode.weights + self.mode.held + mx.get_peak_memory() - before)
        self.mode.held = max(0, self.mode.held + mx.get_active_memory() - before)


def take_turns(
    jobs: Sequence[tuple[Mode, Sequence[list[int]]]],
    params: Sequence[SamplingParams],
    tokens: int = 0,
    watch: Watch = lambda mode, tokens: None,
) -> list[Timed]:
    """Decode every mode's prompts in turns of `tokens` new tokens per row; 0 for one turn until all prompts end."""
    timed = [Timed(mode, mode.decode(prompts, params), watch) for mode, prompts in jobs]
    step = tokens * min(len(params), max(mode.batch for mode, _ in jobs)) or inf
    goal, order = 0.0, list(timed)
    while not all(one.is_done for one in timed):
        goal += step
        for one in order:
            if not one.is_done:
                one.run(goal)
        order = order[1:] + order[:1]
    return timed


# Larger than a forward's rounding errors, and much smaller than real differences. In float32 with OpenBLAS, logits of
# one token and of eight differ by up to 3e-5. For 16-bit types: two steps between logits of 8 and 16.
TOLERANCES = {mx.float32: 1e-3, mx.float16: 0.016, mx.bfloat16: 0.125}


@dataclass(frozen=True)
class TextComparison:
    """How one mode's continuations compare with the reference's, counted by prompt."""

    identical: int = 0
    excused: int = 0
    """Continuations whose first difference is a near-tie: both tokens are within the tolerance of the target's best."""
    different: int = 0


def tolerance_for(model: Target | Mode) -> float:
    """Return how close two logits must be for rounding in the model's type to decide between them."""
    return TOLERANCES.get(model.dtype, 1e-3)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the first index at which two continuations differ, or at which one ends; None if they are equal."""
    return next((index for index, (left, right) in enumerate(zip_longest(a, b)) if left != right), None)


def compare(
    target: Target,
    prompts: Sequence[list[int]],
    reference: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    tolerance: float,
) -> TextComparison:
    """Count the continuations that are equal to the reference's, differ by rounding, or differ otherwise."""
    identical = excused = 0
    for prompt, expected, actual, each in zip(prompts, reference, tokens, params, strict=True):
        at = first_difference(expected, actual)
        if at is None:
            identical += 1
        elif at < min(len(expected), len(actual)):
            candidates = {expected[at], actual[at]}
            excused += _is_near_tie(target, [*prompt, *expected[:at]], candidates, each, tolerance)
    return TextComparison(identical, excused, len(prompts) - identical - excused)


def _is_near_tie(
    target: Target, tokens: list[int], candidates: set[int], params: SamplingParams, tolerance: float
) -> bool:
    """Return whether both candidates' scores (logits + temperature x noise) are within the tolerance of the best."""
    scores = target.forward(mx.array([tokens], mx.int32)).logits[:, -1:].astype(mx.float32)
    if params.rule != "greedy":
        batch = SamplingBatch.of([params], [params.seed or 0])
        position = mx.array([[len(tokens)]], mx.int32)
        scores = scores + params.temperature * gumbel(batch, position, scores.shape[-1])
    by_token = np.array(scores[0, 0])
    return all(by_token.max() - by_token[candidate] < tolerance for candidate in candidates)
