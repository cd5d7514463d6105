"""The one thread that loads and owns the engine: requests go in by a queue, events come back by the event loop."""

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
class RequestEvent:
    """What a step has added to a request."""

    index: int
    """Its place among the requests of its job."""
    tokens: list[int]
    logprobs: list[TokenLogprob]
    """One for each of the tokens, where the request asked."""
    output: Output | None
    """The whole, when the request has ended."""


@dataclass(eq=False)
class Job:
    """The engine's requests of one HTTP request, and their events. Belongs to the event loop."""

    requests: Sequence[Request]
    unfinished: int = 0
    _events: asyncio.Queue[RequestEvent] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.unfinished = len(self.requests)

    def report(self, event: RequestEvent) -> None:
        self.unfinished -= event.output is not None
        self._events.put_nowait(event)

    async def events(self) -> list[RequestEvent]:
        """All that wait, at least one: a slow reader gets more at a time."""
        found = [await self._events.get()]
        while not self._events.empty():
            found.append(self._events.get_nowait())
        return found


@dataclass(eq=False)
class _Slot:
    """A request in the engine, and how many of its tokens have been reported."""

    request: Request
    job: Job
    index: int
    reported: int = 0


@dataclass(eq=False)
class _Scoring:
    score: Score
    result: asyncio.Future[list[TokenLogprob]]
    found: list[TokenLogprob] = field(default_factory=list)


class Worker:
    """Runs an engine in a thread of its own, because MLX arrays belong to the thread that made them.

    All methods are for the event loop's thread. `load` is called in the worker's; what it raises is kept in `failure`.
    """

    def __init__(self, load: Callable[[], Loaded]):
        self._load = load
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._slots: list[_Slot] = []
        self._scorings: deque[_Scoring] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self.loaded: Loaded | None = None
        """None until everything is in memory."""
        self.observer: Callable[[RoundResult], None] | None = None
        """Called after every round, in the worker's thread."""
        self.failure: BaseException | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> Job:
        """Queue requests; the job reports their events. Those that have ended already are reported at once."""
        job = Job(requests)
        for index, request in enumerate(requests):
            if request.finish_reason is not None:
                job.report(RequestEvent(index, [], [], Output.of(request, None)))
        self._commands.put(lambda: self._submit(job))
        return job

    def cancel(self, job: Job) -> None:
        """Cancel the requests of a job; nothing happens to those that have ended."""
        if job.unfinished:
            self._commands.put(lambda: self._cancel(job))

    async def score(self, score: Score) -> list[TokenLogprob]:
        """Log probabilities of a prompt, computed between the steps of others."""
        assert self._loop is not None
        result: asyncio.Future[list[TokenLogprob]] = self._loop.create_future()
        self._commands.put(lambda: self._scorings.append(_Scoring(score, result)))
        return await result

    def abort_all(self, reason: str) -> None:
        """End every request with an error."""
        self._commands.put(lambda: self._abort_all(reason))

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
                self._run_commands(engine, wait=engine.idle and not self._scorings)
                if not engine.idle:
                    self._step(engine)
                self._score_next()
        except BaseException as e:
            self.failure = e
            self.loaded = None
            reason = "the engine's thread died"
            self._report([(s.job, RequestEvent(s.index, [], [], _failed(s.request, reason))) for s in self._slots])
            if self._slots:
                log.exception(reason)

    def _run_commands(self, engine: Engine, wait: bool) -> None:
        while wait or not self._commands.empty():
            try:
                self._commands.get()()
            except Exception as e:
                self._fail_all(engine, e)
            wait = False

    def _step(self, engine: Engine) -> None:
        try:
            engine.step()
        except Exception:  # the requests that the step worked on have ended, and those that wait get their turn
            log.exception("a step of the engine failed; the requests in it end")
        self._publish(engine)

    def _fail_all(self, engine: Engine, error: Exception) -> None:
        """All requests end, and the engine continues with those to come."""
        log.exception("the engine failed; the requests in it end")
        engine.abandon(f"the engine failed: {type(error).__name__}: {error}")
        self._publish(engine)

    def _publish(self, engine: Engine) -> None:
        """Report what has changed, with one wakeup of the event loop for all requests."""
        events: list[tuple[Job, RequestEvent]] = []
        ended = False
        for slot in self._slots:
            request, before = slot.request, slot.reported
            slot.reported = len(request.tokens)
            done = request.finish_reason is not None
            ended |= done
            if done or slot.reported > before:
                output = engine.output(request) if done else None
                new = RequestEvent(slot.index, request.tokens[before:], request.logprobs[before:], output)
                events.append((slot.job, new))
        if ended:
            self._slots = [slot for slot in self._slots if slot.request.finish_reason is None]
        self._report(events)

    def _report(self, events: Sequence[tuple[Job, RequestEvent]]) -> None:
        if events and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_deliver, events)

    def _submit(self, job: Job) -> None:
        assert self.loaded is not None
        for index, request in enumerate(job.requests):
            if request.finish_reason is not None:
                continue
            self.loaded.engine.submit(request)
            self._slots.append(_Slot(request, job, index))

    def _cancel(self, job: Job) -> None:
        assert self.loaded is not None
        for request in job.requests:
            self.loaded.engine.cancel(request)
        self._publish(self.loaded.engine)

    def _abort_all(self, reason: str) -> None:
        assert self.loaded is not None
        self.loaded.engine.abandon(reason)
        self._publish(self.loaded.engine)

    def _score_next(self) -> None:
        """One piece of the prompt whose turn it is."""
        if not self._scorings:
            return
        scoring = self._scorings.popleft()
        if scoring.result.cancelled():
            return
        try:
            scoring.found += next(scoring.score)
            self._scorings.append(scoring)
        except StopIteration:
            self._finish_scoring(scoring, None)
        except Exception as e:
            log.exception("a prompt could not be scored")
            self._finish_scoring(scoring, ApiError(500, f"the prompt could not be scored: {type(e).__name__}"))

    def _finish_scoring(self, scoring: _Scoring, error: Exception | None) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_resolve, scoring, error)

    def _stop(self) -> None:
        self._stopped = True


def _deliver(events: Sequence[tuple[Job, RequestEvent]]) -> None:
    for job, event in events:
        job.report(event)


def _resolve(scoring: _Scoring, error: Exception | None) -> None:
    if scoring.result.done():
        return
    if error is not None:
        scoring.result.set_exception(error)
    else:
        scoring.result.set_result(scoring.found)


def _failed(request: Request, reason: str) -> Output:
    request.fail(reason)
    return Output.of(request, None)
