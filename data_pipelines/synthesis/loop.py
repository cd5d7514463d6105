"""Run many generation tasks on the engine at once, and find the batch size with the best throughput."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import NoReturn, Protocol, TypeVar

from tqdm import tqdm

from eagle_mlx.engine import Engine
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.plan import RoundResult
from eagle_mlx.policy import FixedPolicy, ThroughputPolicy
from eagle_mlx.policy.throughput import MOST_TOKENS
from eagle_mlx.proposers.capturing import CapturingProposer
from eagle_mlx.proposers.head import HeadProposer
from eagle_mlx.request_state import RequestState
from eagle_mlx.target import Target

from .report import LOOK

FIRST_ROWS = 32
"""Initial batch size: 32 x 500 tokens take 2.4 GB with an 8B model (36 layers, 8 KV heads of 128, 16 bits)."""
MOST_ROWS = 256
"""Maximum batch size. Its logits take 150 MB with a vocabulary of 150,000. `kv_bytes` limits the KV cache."""
_AHEAD = 4
"""Number of extra requests that wait, so that a free row is filled in the same step."""
ROUNDS = 64
"""Number of rounds over which a batch size is timed: about a minute on a slow CPU, so that no single pause decides."""
WORTH = 1.1
"""Required speedup from doubling the batch. A smaller gain may be noise and costs memory."""
_SHOW_SECONDS = 0.5
"""Interval between updates of the shown speed."""


class Task(Protocol):
    """Work for which the target generates one text after another."""

    def submit(self) -> RequestState | None:
        """Submit the request for the next text; return None if the task has ended."""

    def take(self, request: RequestState) -> None:
        """Use a finished text. Raises DataError if the request failed."""

    def give_up(self, request: RequestState) -> bool:
        """Return whether the unfinished text is already unusable. If so, the task ends without it."""

    def stop(self, request: RequestState) -> None:
        """End the task without the unfinished text, because time is up."""


T = TypeVar("T", bound=Task)


def run_tasks(
    engine: Engine,
    following: Callable[[int], T | None],
    shown: tqdm[NoReturn] | None = None,
    over: Callable[[], bool] = lambda: False,
) -> Iterator[T]:
    """Yield each task once it has ended; texts of different tasks decode in one batch.

    `following(running)` returns the next task, or None if none is wanted now. The iterator ends when no task runs;
    close it early to cancel running tasks. `over()` is called before each step; once true, running tasks stop. `shown`
    displays the tokens per second.
    """
    running: dict[T, RequestState] = {}
    checked: dict[T, int] = {}
    """Number of blocks of `LOOK` tokens that have been checked in each unfinished text."""
    speed = Speed(shown)
    try:
        while True:
            while len(running) < engine.max_batch + _AHEAD and (task := following(len(running))) is not None:
                if (request := task.submit()) is None:
                    yield task
                else:
                    running[task], checked[task] = request, 0
            if not running:
                return
            if over():
                for task in list(running):
                    request = running.pop(task)
                    engine.cancel(request)
                    task.stop(request)
                    yield task
                return
            engine.step()
            for task, request in list(running.items()):
                before, checked[task] = checked[task], len(request.tokens) // LOOK
                if request.finish_reason is not None:
                    task.take(request)
                    next_request = task.submit()
                elif checked[task] > before and task.give_up(request):
                    engine.cancel(request)
                    next_request = None
                else:
                    continue
                speed.finished += len(request.tokens)
                if next_request is not None:
                    running[task], checked[task] = next_request, 0
                    continue
                del running[task], checked[task]
                yield task
            speed.show(running.values())
    finally:
        for request in running.values():
            engine.cancel(request)


def seed_of(seed: int, *parts: int | str) -> int:
    """Return 63 bits derived from a seed and its purpose, independent of the order of work."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2s(text.encode()).digest()[:8], "big") >> 1


@dataclass
class Doubling:
    """Doubles the batch size while that increases throughput; otherwise goes back one step and stays there.

    The best batch size depends on machine and model. A GPU reads the same weights for any batch until arithmetic is the
    bottleneck; a CPU rearranges weights for every product.
    """

    rows: int
    most: int = MOST_ROWS
    settled: bool = False
    _before: tuple[int, float] = (0, 0.0)
    """The previous batch size and its tokens per second."""
    _full: bool = False
    """Whether the batch has been full at this size. Earlier rounds include prefill and are not timed."""
    _rounds: int = 0
    _tokens: int = 0
    _seconds: float = 0.0

    def add(self, active: int, tokens: int, seconds: float) -> None:
        """Add a round with its active rows, emitted tokens and duration."""
        if self.settled:
            return
        if not self._full:
            self._full = active >= self.rows
            return
        self._rounds += 1
        self._tokens += tokens
        self._seconds += seconds
        if self._rounds == ROUNDS:
            self._decide(self._tokens / self._seconds)

    def _decide(self, rate: float) -> None:
        rows, rate_before = self._before
        if rate < WORTH * rate_before:
            self.rows, self.settled = rows, True
        elif 2 * self.rows > self.most:
            self.settled = True
        else:
            self._before = self.rows, rate
            self.rows *= 2
            self._full, self._rounds, self._tokens, self._seconds = False, 0, 0, 0.0


def growing_engine(
    target: Target,
    head: DraftHead | None = None,
    captured: Sequence[int] = (),
    most_tokens: int = MOST_TOKENS,
    rows: int | None = None,
) -> Engine:
    """Return an engine with a batch of `rows`; by default the batch grows while that increases throughput.

    A `head` drafts up to `most_tokens` if that is faster; the text is the same. Hidden states of the layers `captured`
    are kept.
    """
    drafts = HeadProposer(head) if head is not None and most_tokens else None
    policy = ThroughputPolicy(most_tokens) if drafts is not None else FixedPolicy(0)
    proposer = CapturingProposer(captured, drafts) if captured else drafts
    engine = Engine(target, proposer, policy=policy, max_batch=rows or FIRST_ROWS)
    return engine if rows else let_grow(engine)


def let_grow(engine: Engine) -> Engine:
    """Let the engine's batch grow from `max_batch` while that increases throughput. Text does not depend on it."""
    doubling = Doubling(engine.max_batch)

    def observe(result: RoundResult) -> None:
        doubling.add(engine.active, result.emitted, result.seconds)
        engine.max_batch = doubling.rows

    engine.observer = observe
    return engine


class Speed:
    """Shows tokens per second in a progress bar, including unfinished answers."""

    def __init__(self, shown: tqdm[NoReturn] | None):
        self.shown, self.finished = shown, 0
        self._started = self._last = monotonic()

    def show(self, running: Iterable[RequestState]) -> None:
        now = monotonic()
        if self.shown is not None and now >= self._last + _SHOW_SECONDS:
            self._last = now
            tokens = self.finished + sum(len(request.tokens) for request in running)
            self.shown.set_postfix_str(f"{tokens / (now - self._started):,.0f} tokens/s", refresh=False)
