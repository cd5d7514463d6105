"""The one thread that loads and owns the engine: rows go in by a queue, what is new comes back by the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread

from eagle_mlx.engine import Engine
from eagle_mlx.engine.output import Output
from eagle_mlx.plan import RoundResult
from eagle_mlx.request import Request, TokenLogprob

from .errors import ApiError
from .model import Loaded

log = logging.getLogger("eagle_mlx.serve")

Score = Iterator[list[TokenLogprob]]
"""Log probabilities of a prompt, piece by piece, each computed when it is asked for."""


@dataclass(frozen=True)
class News:
    """What a step has added to a row."""

    index: int
    """Its place among the rows of its job."""
    tokens: list[int]
    logprobs: list[TokenLogprob]
    """One for each of the tokens, where the request asked."""
    output: Output | None
    """The whole, when the row has ended."""


@dataclass(eq=False)
class Job:
    """The rows of one request, and what is new of them. Belongs to the event loop."""

    rows: Sequence[Request]
    unfinished: int = 0
    _news: asyncio.Queue[News] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.unfinished = len(self.rows)

    def tell(self, news: News) -> None:
        self.unfinished -= news.output is not None
        self._news.put_nowait(news)

    async def news(self) -> list[News]:
        """All that is new, once there is something: whoever is slow gets more at a time."""
        found = [await self._news.get()]
        while not self._news.empty():
            found.append(self._news.get_nowait())
        return found


@dataclass(eq=False)
class _Seat:
    """A row in the engine, and how much of it has been told."""

    row: Request
    job: Job
    index: int
    told: int = 0


@dataclass(eq=False)
class _Scoring:
    score: Score
    answer: asyncio.Future[list[TokenLogprob]]
    found: list[TokenLogprob] = field(default_factory=list)


class Worker:
    """Runs an engine in a thread of its own, because MLX arrays belong to the thread that made them.

    All methods are for the event loop's thread. `load` is called in the worker's; what it raises is kept in `failure`.
    """

    def __init__(self, load: Callable[[], Loaded]):
        self._load = load
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._seats: list[_Seat] = []
        self._scorings: deque[_Scoring] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self.loaded: Loaded | None = None
        """None until everything is in memory."""
        self.observer: Callable[[RoundResult], None] | None = None
        """Told of every round, in the worker's thread."""
        self.failure: BaseException | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def submit(self, rows: Sequence[Request]) -> Job:
        """Let rows wait for their turn; the job tells what becomes of them. Those that have ended are told at once."""
        job = Job(rows)
        for index, row in enumerate(rows):
            if row.finish_reason is not None:
                job.tell(News(index, [], [], Output.of(row, None)))
        self._commands.put(lambda: self._seat(job))
        return job

    def cancel(self, job: Job) -> None:
        """Let the rows of a job go; nothing happens to those that have ended."""
        if job.unfinished:
            self._commands.put(lambda: self._leave(job))

    async def score(self, score: Score) -> list[TokenLogprob]:
        """Log probabilities of a prompt, computed between the steps of others."""
        assert self._loop is not None
        answer: asyncio.Future[list[TokenLogprob]] = self._loop.create_future()
        self._commands.put(lambda: self._scorings.append(_Scoring(score, answer)))
        return await answer

    def abandon(self, reason: str) -> None:
        """End every row with an error."""
        self._commands.put(lambda: self._abandon(reason))

    def stop(self) -> None:
        """End the thread after the step that it is in."""
        self._commands.put(self._stop)
        self._thread.join(timeout=5)

    # In the worker's thread.

    def _run(self) -> None:
        try:
            loaded = self._load()
            engine = loaded.engine
            engine.observer = self.observer
            self.loaded = loaded
            while not self._stopped:
                self._obey(engine, wait=engine.idle and not self._scorings)
                if not engine.idle:
                    self._step(engine)
                self._score_on()
        except BaseException as e:
            self.failure = e
            self.loaded = None
            self._tell(
                [(s.job, News(s.index, [], [], _failed(s.row, "the engine's thread died"))) for s in self._seats]
            )
            if self._seats:
                log.exception("the engine's thread died")

    def _obey(self, engine: Engine, wait: bool) -> None:
        while wait or not self._commands.empty():
            try:
                self._commands.get()()
            except Exception as e:
                self._give_up(engine, e)
            wait = False

    def _step(self, engine: Engine) -> None:
        try:
            engine.step()
        except Exception:  # the rows that the step worked on have ended, and those that wait get their turn
            log.exception("a step of the engine failed; the requests in it end")
        self._publish(engine)

    def _give_up(self, engine: Engine, error: Exception) -> None:
        """All rows end, and the engine goes on with those to come."""
        log.exception("the engine failed; the requests in it end")
        engine.abandon(f"the engine failed: {type(error).__name__}: {error}")
        self._publish(engine)

    def _publish(self, engine: Engine) -> None:
        """Tell what has changed, with one wakeup of the event loop for all rows."""
        told: list[tuple[Job, News]] = []
        ended = False
        for seat in self._seats:
            row, before = seat.row, seat.told
            seat.told = len(row.tokens)
            done = row.finish_reason is not None
            ended |= done
            if done or seat.told > before:
                output = engine.output(row) if done else None
                told.append((seat.job, News(seat.index, row.tokens[before:], row.logprobs[before:], output)))
        if ended:
            self._seats = [seat for seat in self._seats if seat.row.finish_reason is None]
        self._tell(told)

    def _tell(self, told: Sequence[tuple[Job, News]]) -> None:
        if told and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_deliver, told)

    def _seat(self, job: Job) -> None:
        assert self.loaded is not None
        for index, row in enumerate(job.rows):
            if row.finish_reason is not None:
                continue
            self.loaded.engine.submit(row)
            self._seats.append(_Seat(row, job, index))

    def _leave(self, job: Job) -> None:
        assert self.loaded is not None
        for row in job.rows:
            self.loaded.engine.cancel(row)
        self._publish(self.loaded.engine)

    def _abandon(self, reason: str) -> None:
        assert self.loaded is not None
        self.loaded.engine.abandon(reason)
        self._publish(self.loaded.engine)

    def _score_on(self) -> None:
        """One piece of the prompt whose turn it is."""
        if not self._scorings:
            return
        scoring = self._scorings.popleft()
        if scoring.answer.cancelled():
            return
        try:
            scoring.found += next(scoring.score)
            self._scorings.append(scoring)
        except StopIteration:
            self._answer(scoring, None)
        except Exception as e:
            log.exception("a prompt could not be scored")
            self._answer(scoring, ApiError(500, f"the prompt could not be scored: {type(e).__name__}"))

    def _answer(self, scoring: _Scoring, error: Exception | None) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_settle, scoring, error)

    def _stop(self) -> None:
        self._stopped = True


def _deliver(told: Sequence[tuple[Job, News]]) -> None:
    for job, news in told:
        job.tell(news)


def _settle(scoring: _Scoring, error: Exception | None) -> None:
    if scoring.answer.done():
        return
    if error is not None:
        scoring.answer.set_exception(error)
    else:
        scoring.answer.set_result(scoring.found)


def _failed(row: Request, reason: str) -> Output:
    row.fail(reason)
    return Output.of(row, None)
