"""Run many generation tasks on the engine at once, and find the batch size with the best throughput."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from eagle_mlx.engine import Engine
from eagle_mlx.errors import DataError
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.plan import RoundResult
from eagle_mlx.policy import FixedPolicy, ThroughputPolicy
from eagle_mlx.policy.throughput import MOST_TOKENS
from eagle_mlx.proposers.head import HeadProposer
from eagle_mlx.request import Output
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import Target, fingerprint
from eagle_mlx.text import template_args

from ..jsonl import NAMED
from ..options import FIRST_ROWS, MOST_ROWS

LOOK = 128
"""Interval in tokens between checks for loops. Benchmarks leave out prompts by the same number."""
_AHEAD = 4
"""Number of extra requests that wait, so that a free row is filled in the same step."""
ROUNDS = 64
"""Number of rounds over which a batch size is timed: about a minute on a slow CPU, so that no single pause decides."""
WORTH = 1.1
"""Required speedup from doubling the batch. A smaller gain may be noise and costs memory."""


class Task(ABC):
    """Work for which the target generates one text after another."""

    origin: str
    """Names the task in error messages."""

    @abstractmethod
    def next(self) -> tuple[list[int], SamplingParams] | None:
        """Return the prompt and the sampling parameters of the next text; None if the task has ended."""

    @abstractmethod
    def take(self, request: RequestState, output: Output) -> None:
        """Use a finished text."""

    def give_up(self, tokens: Sequence[int]) -> bool:
        """Return whether the unfinished text is already unusable. If so, the task ends without it."""
        return False

    def stop(self) -> None:  # noqa: B027  (a task may do nothing)
        """End the task without the unfinished text, because time is up."""


T = TypeVar("T", bound=Task)


def run_tasks(
    engine: Engine, following: Callable[[int], T | None], over: Callable[[], bool] = lambda: False
) -> Iterator[T]:
    """Yield each task once it has ended; texts of different tasks decode in one batch.

    `following(running)` returns the next task, or None if none is wanted now. Once `over()`, running tasks stop.
    Closing the iterator cancels them. Raises DataError if a text cannot be written.
    """

    def submit(task: T) -> RequestState | None:
        if (text := task.next()) is None:
            return None
        engine.submit(request := engine.prepare(*text))
        return request

    running: dict[T, RequestState] = {}
    checked: dict[T, int] = {}
    """Number of blocks of `LOOK` tokens that have been checked in each unfinished text."""
    try:
        while True:
            while len(running) < engine.max_batch + _AHEAD and (task := following(len(running))) is not None:
                if (request := submit(task)) is None:
                    yield task
                else:
                    running[task], checked[task] = request, 0
            if not running:
                return
            if over():
                for task in list(running):
                    request = running.pop(task)
                    engine.cancel(request)
                    task.stop()
                    yield task
                return
            engine.step()
            for task, request in list(running.items()):
                before, checked[task] = checked[task], len(request.tokens) // LOOK
                next_request = None
                if request.finish_reason is not None:
                    output = engine.output(request)
                    if output.finish_reason == "error":
                        raise DataError(f"{task.origin}: the target could not write: {output.error}")
                    task.take(request, output)
                    next_request = submit(task)
                elif checked[task] > before and task.give_up(request.tokens):
                    engine.cancel(request)
                else:
                    continue
                if next_request is not None:
                    running[task], checked[task] = next_request, 0
                    continue
                del running[task], checked[task]
                yield task
    finally:
        for request in running.values():
            engine.cancel(request)


@dataclass(frozen=True)
class Counts:
    """Base of a dataclass of counts, with conversion to plain values."""

    def plus(self, counts: Mapping[str, int]) -> Self:
        """Return the sums with another report's counts."""
        return replace(self, **{name: getattr(self, name) + count for name, count in counts.items()})

    def counts(self) -> dict[str, int]:
        """Return the counts above 0 by name, as in a partial file."""
        return {name: count for name, count in vars(self).items() if count}


def seed_of(seed: int, *parts: int | str) -> int:
    """Return 63 bits derived from a seed and its purpose, independent of the order of work."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2s(text.encode()).digest()[:8], "big") >> 1


@dataclass
class Doubling:
    """Doubles the batch size while that increases throughput; otherwise goes back one step and stays there."""

    rows: int
    most: int = MOST_ROWS
    settled: bool = False
    _rate: float = 0.0
    _rounds: list[tuple[int, float]] = field(default_factory=list)
    """Tokens and seconds of the rounds since the batch is full. The first is not timed, because it includes prefill."""

    def add(self, active: int, tokens: int, seconds: float) -> None:
        if self.settled or (not self._rounds and active < self.rows):
            return
        self._rounds.append((tokens, seconds))
        if len(self._rounds) <= ROUNDS:
            return
        counts, durations = zip(*self._rounds[1:], strict=True)
        rate = sum(counts) / sum(durations)
        if rate < WORTH * self._rate:
            self.rows, self.settled = self.rows // 2, True
        elif 2 * self.rows > self.most:
            self.settled = True
        else:
            self.rows *= 2
            self._rate, self._rounds = rate, []


def growing_engine(
    target: Target, head: DraftHead | None = None, most_tokens: int = MOST_TOKENS, rows: int | None = None
) -> Engine:
    """Return an engine with a batch of `rows`; by default the batch grows while that increases throughput.

    A `head` drafts up to `most_tokens` if that is faster.
    """
    drafts = HeadProposer(head) if head is not None and most_tokens else None
    policy = ThroughputPolicy(most_tokens) if drafts is not None else FixedPolicy(0)
    engine = Engine(target, drafts, policy=policy, max_batch=rows or FIRST_ROWS)
    if rows is None:
        doubling = Doubling(engine.max_batch)

        def observe(result: RoundResult) -> None:
            doubling.add(engine.active, result.emitted, result.seconds)
            engine.max_batch = doubling.rows

        engine.observer = observe
    return engine


def text_settings(target: Target) -> dict[str, Any]:
    """Return what a target's texts depend on, as plain values; a file of texts is continued only if it is equal."""
    return {
        "target": fingerprint(target),
        NAMED: target.name,
        "target_template_args": dict(template_args(target.tokenizer)),
        "target_eos_tokens": sorted(target.eos_token_ids),
    }
