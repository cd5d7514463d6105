"""The loop that drives the engine: many tasks side by side, in as many rows at once as pay."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Generic, NoReturn, Protocol, TypeVar

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
"""A beginning that fits small machines: 32 conversations of 500 tokens take 2.4 GB with a model of 8 billion parameters
(36 layers, 8 heads of 128, 16 bits)."""
MOST_ROWS = 256
"""Logits of so many rows take 150 MB if a vocabulary has 150,000 tokens. Keys and values have a limit of their own
(`kv_bytes` of `Engine`)."""
_AHEAD = 4
"""Requests that wait beyond the rows that decode, so that a free row is taken in the same step."""
ROUNDS = 64
"""Rounds over which a number of rows is timed: a minute of a slow CPU, so that no single pause decides."""
WORTH = 1.1
"""What twice the rows must give: less may be chance, and more rows take more memory."""
_SHOW_SECONDS = 0.5
"""Between two updates of the shown speed."""


class Task(Protocol):
    """Work for which the target writes one text after another."""

    def submit(self) -> RequestState | None:
        """Submit the request for the next text; None if the task has ended."""

    def take(self, request: RequestState) -> None:
        """Use a text that has been written. Raises DataError if the request failed."""

    def give_up(self, request: RequestState) -> bool:
        """Whether the text being written cannot be used any more. If so, the task ends without it."""

    def stop(self, request: RequestState) -> None:
        """End the task without the text being written, because the time is over."""


T = TypeVar("T", bound=Task)


@dataclass(eq=False)
class _Running(Generic[T]):
    task: T
    request: RequestState
    looks: int = 0
    """How often the text has been looked at while it was written."""

    def look(self) -> bool:
        """Whether enough has been written since the last look; then this is one."""
        before, self.looks = self.looks, len(self.request.tokens) // LOOK
        return self.looks > before


def run_tasks(
    engine: Engine,
    following: Callable[[int], T | None],
    shown: tqdm[NoReturn] | None = None,
    over: Callable[[], bool] = lambda: False,
) -> Iterator[T]:
    """Yield each task as soon as it has ended; texts of different tasks decode side by side.

    `following(running)` gives the next task while so many run, or None if none is wanted now. The iterator ends when no
    task runs; leave it early to cancel those that do. `over()` is asked before each step; once it holds, running tasks
    stop. `shown` gets the tokens per second.
    """
    running: list[_Running[T]] = []
    speed = Speed(shown)
    try:
        while True:
            while len(running) < engine.max_batch + _AHEAD and (task := following(len(running))) is not None:
                if (request := task.submit()) is None:
                    yield task
                else:
                    running.append(_Running(task, request))
            if not running:
                return
            if over():
                while running:
                    one = running.pop(0)
                    engine.cancel(one.request)
                    one.task.stop(one.request)
                    yield one.task
                return
            engine.step()
            for one in list(running):
                if one.request.finish_reason is not None:
                    speed.finished += len(one.request.tokens)
                    one.task.take(one.request)
                    if (request := one.task.submit()) is not None:
                        one.request, one.looks = request, 0
                        continue
                elif one.look() and one.task.give_up(one.request):
                    speed.finished += len(one.request.tokens)
                    engine.cancel(one.request)
                else:
                    continue
                running.remove(one)
                yield one.task
            speed.show(one.request for one in running)
    finally:
        for one in running:
            engine.cancel(one.request)


def seed_of(seed: int, *parts: int | str) -> int:
    """63 bits made from a seed and what it is for, which no order of work changes."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2s(text.encode()).digest()[:8], "big") >> 1


@dataclass
class Doubling:
    """Rows at once, doubled while that makes more tokens a second; it goes back once where it does not, and stays.

    What a GPU has to read is the same for any number of rows, until its arithmetic is the slower part. A CPU brings
    weights into shape for each product anew. So the right number is the machine's and the model's, and it is measured.
    """

    rows: int
    most: int = MOST_ROWS
    settled: bool = False
    _before: tuple[int, float] = (0, 0.0)
    """The rows before they were last doubled, and the tokens a second that they made."""
    _full: bool = False
    """Whether all rows have been taken since: the prompts that fill them come first, and are not timed."""
    _rounds: int = 0
    _tokens: int = 0
    _seconds: float = 0.0

    def add(self, active: int, tokens: int, seconds: float) -> None:
        """A round that made so many tokens, while so many rows were taken."""
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
    """An engine that decodes so many `rows` at once, by default as many as pay.

    A `head` drafts as much as pays, up to `most_tokens`; the text is the same. The hidden states of the layers
    `captured` are kept, if there are any.
    """
    drafts = HeadProposer(head) if head is not None and most_tokens else None
    policy = ThroughputPolicy(most_tokens) if drafts is not None else FixedPolicy(0)
    proposer = CapturingProposer(captured, drafts) if captured else drafts
    engine = Engine(target, proposer, policy=policy, max_batch=rows or FIRST_ROWS)
    return engine if rows else let_grow(engine)


def let_grow(engine: Engine) -> Engine:
    """The engine, with as many rows at once as pay; `max_batch` is what it begins with. Text does not depend on it."""
    doubling = Doubling(engine.max_batch)

    def observe(result: RoundResult) -> None:
        doubling.add(engine.active, result.emitted, result.seconds)
        engine.max_batch = doubling.rows

    engine.observer = observe
    return engine


class Speed:
    """Shows tokens per second beside a progress bar, unfinished answers included."""

    def __init__(self, shown: tqdm[NoReturn] | None):
        self.shown = shown
        self.finished = 0
        self._started = self._last = monotonic()

    def show(self, running: Iterable[RequestState]) -> None:
        now = monotonic()
        if self.shown is None or self.shown.disable or now - self._last < _SHOW_SECONDS:
            return
        self._last = now
        tokens = self.finished + sum(len(request.tokens) for request in running)
        self.shown.set_postfix_str(f"{tokens / (now - self._started):,.0f} tokens/s")
