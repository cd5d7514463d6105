"""Modes that decode the same prompts in turns of a few tokens, so that all meet the machine at the same speeds."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import mlx.core as mx

from eagle_mlx.sampling_params import SamplingParams

from .continuation import Continuation, Decoding
from .modes import Mode

Timed = tuple[float, list[Continuation]]
"""The seconds that a mode took, and its outputs."""


class _Runner:
    """One mode on its way through the prompts."""

    def __init__(self, mode: Mode, decoding: Decoding):
        self.mode, self.decoding = mode, decoding
        self.seconds, self.tokens = 0.0, 0
        self.outputs: list[Continuation] | None = None

    def run(self, goal: int) -> None:
        """Continue until there are so many tokens, or the end."""
        if self.outputs is not None:
            return
        mx.clear_cache()  # every turn begins with no buffers of another mode's
        start = perf_counter()
        try:
            while self.tokens < goal:
                self.tokens += next(self.decoding)
        except StopIteration as end:
            self.outputs = end.value
        self.mode.sync()  # what was dispatched for its next turn must not slow those of others
        self.seconds += perf_counter() - start


def take_turns(
    jobs: Sequence[tuple[Mode, Sequence[list[int]]]], params: Sequence[SamplingParams], tokens: int
) -> list[Timed]:
    """Decode by every mode its prompts; the modes change over whenever one has given `tokens` more a row.

    A mode that gives all its tokens at once has one long turn.
    """
    runners = [_Runner(mode, mode.decode(prompts, params)) for mode, prompts in jobs]
    step = tokens * min(len(params), max(mode.batch for mode, _ in jobs))
    goal, order = 0, list(runners)
    while any(runner.outputs is None for runner in runners):
        goal += step
        for runner in order:
            runner.run(goal)
        order = order[1:] + order[:1]
    return [(runner.seconds, runner.outputs or []) for runner in runners]
