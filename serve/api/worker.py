"""The thread that loads and owns a model's engine. Jobs arrive through a queue; events return to the event loop."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from threading import Event, Thread, Timer
from time import perf_counter
from typing import TypeVar

import mlx.core as mx

from eagle_mlx.engine import Engine
from eagle_mlx.errors import EagleError, RanksError
from eagle_mlx.plan import RoundResult
from eagle_mlx.proposers.memory import Remembered
from eagle_mlx.request import Output, TokenLogprob
from eagle_mlx.request_state import RequestState

from .. import log
from ..learning.learner import Learner
from .errors import NO_TOKEN, ApiError
from .model import Loaded

T = TypeVar("T")
_DIED = "the engine's thread died"

TIME = "time"  # `Output.cut_off` of a request that took too long
EXIT_SECONDS = 4.0  # time to send errors after the engine is lost; then the process exits


@dataclass(frozen=True)
class RequestEvent:
    index: int
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprob] = ()  # one per token, if requested
    output: Output | None = None  # the complete output once the request has ended
    from_draft: bytes | bytearray = b""  # a byte for each token: 1 if it is an accepted draft token
    texts: Sequence[str] | None = None  # what each token adds, if the engine has decoded it

    def part(self, part: slice) -> RequestEvent:
        """Return an event of some of the tokens; the last part has the output."""
        output = self.output if part.stop >= len(self.tokens) else None
        texts = None if self.texts is None else self.texts[part]
        return RequestEvent(self.index, self.tokens[part], self.logprobs[part], output, self.from_draft[part], texts)


@dataclass(eq=False)
class Job:
    """The engine requests of one HTTP request, and their events. Belongs to the event loop."""

    deadline: float  # when they must have ended, by the worker's clock
    unfinished: int  # requests that have not ended, including those not created yet
    requests: Sequence[RequestState] = ()
    answer_seconds: float = inf  # limit of each, from its first token to its end
    _events: asyncio.Queue[RequestEvent] = field(default_factory=asyncio.Queue)
    _ended: set[int] = field(default_factory=set)

    def report(self, event: RequestEvent) -> None:
        if event.index in self._ended:
            return
        if event.output is not None:
            self._ended.add(event.index)
            self.unfinished -= 1
        self._events.put_nowait(event)

    def fail(self, reason: str) -> None:
        """End its requests with an error, except those that have ended."""
        for index, request in enumerate(self.requests):
            request.fail(reason)
            self.report(RequestEvent(index, (), output=request.output(None)))

    async def events(self) -> list[RequestEvent]:
        """Return all pending events, at least one; a slow reader gets more at a time."""
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events


@dataclass(eq=False)
class _Slot:
    request: RequestState
    job: Job
    index: int
    deadline: float
    reported: int = 0


class Worker:
    """Runs an engine in its own thread, because MLX arrays belong to the thread that made them.

    The thread stays after unloading: MLX 0.32 keeps an internal thread for each thread that has computed on a CPU. Call
    all methods from the event loop's thread.
    """

    def __init__(self, load: Callable[[], Loaded], observer: Callable[[RoundResult], None]):
        """observer: is called after every round, in the worker's thread."""
        self._load, self._observer = load, observer
        self._commands: SimpleQueue[tuple[Callable[[], None], Callable[[str], None]]] = SimpleQueue()
        """Work for the thread, and how to refuse it with a reason if the thread is lost."""
        self.slots: list[_Slot] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unloading, self._stopped = False, Event()
        self._lost = ""  # why the engine will not answer anymore
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._texts: Remembered = {}  # the memory of texts while the model is not loaded, unless it is in a file
        self.loaded: Loaded | None = None  # None unless the model is fully loaded
        self.failure: BaseException | None = None  # the error of the last load or of the engine
        self.clock: Callable[[], float] = perf_counter
        self.work: tuple[float, bool] | None = None
        """When the present work of the thread began, by the clock, and whether it is a step; None while it waits."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    async def load(self) -> None:
        """Load the model, which must not be loaded yet. Raises any error of loading."""
        await self._ask(self._load_model)

    async def unload(self) -> None:
        """Unload the model, which must have no requests, and free its memory."""
        self._put(self._begin_unloading)
        await self._ask(_free_memory)

    def submit(self, job: Job) -> None:
        """Queue a job's requests. Those that have already ended are reported at once."""
        for index, request in enumerate(job.requests):
            if request.finish_reason is not None:
                job.report(RequestEvent(index, (), output=request.output(None)))
        self._put(lambda: self._submit(job), job.fail)

    def cancel(self, job: Job) -> None:
        def change(engine: Engine) -> None:
            for request in job.requests:
                engine.cancel(request)

        if job.unfinished:
            self._put(lambda: self._change(change))

    async def between_steps(self, work: Callable[[], T]) -> T:
        """Run `work` in the engine's thread and return its result. Raises its errors, and ApiError 500."""

        def run() -> T:
            if self.loaded is None:
                raise ApiError(500, self._lost or _DIED)
            return work()

        return await self._ask(run)

    def abort_all(self, reason: str) -> None:
        self._put(lambda: self._change(lambda engine: engine.abandon(reason)))

    def stop(self) -> None:
        """End the thread after its current step; use `join` to wait."""
        self._put(self._stopped.set)

    def join(self) -> None:
        """Wait briefly for the thread, and close the model."""
        self._thread.join(timeout=0 if self._lost else 5)
        if self.loaded is not None:
            _close(self.loaded)

    def end_process(self, reason: str) -> None:
        """End all requests with an error, and soon the process with 1, although the thread hangs."""
        self._give_up(reason)
        _exit_soon()

    def _give_up(self, reason: str, failure: EagleError | None = None) -> None:
        """End all requests with an error: the thread may hang."""
        self._lost, self.failure = reason, failure
        self.loaded = None
        for job in {slot.job for slot in self.slots}:
            job.fail(reason)
        with suppress(Empty):
            while True:
                self._commands.get_nowait()[1](reason)

    def _put(self, work: Callable[[], None], refuse: Callable[[str], None] = lambda reason: None) -> None:
        self._commands.put((work, refuse))

    async def _ask(self, work: Callable[[], T]) -> T:
        """Queue work for the thread, and wait for its result. Nothing is done if the caller stops waiting first."""
        result: Future[T] = Future()

        def run() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(work())
                except BaseException as e:
                    result.set_exception(e)

        def refuse(reason: str) -> None:
            if result.set_running_or_notify_cancel():
                result.set_exception(ApiError(500, reason))

        self._put(run, refuse)
        return await asyncio.wrap_future(result)

    # The methods below run in the worker's thread.

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._commands.get()[0]()
            if self.loaded is not None:
                self._serve(self.loaded)

    def _load_model(self) -> None:
        self._unloading, self.failure = False, None
        try:
            loaded = self._load()
            loaded.engine.observer = self._observer
            loaded.target.on_lost = self._lose
        except BaseException as e:
            self.failure = e
            raise
        if loaded.memory is not None:
            loaded.memory.restore(self._texts)
        self.loaded, self._texts = loaded, {}

    def _serve(self, loaded: Loaded) -> None:
        try:
            self._decode(loaded.engine, loaded.learner)
        except BaseException as e:
            self.failure = e
            if self.slots:
                log.exception(_DIED)
            jobs, self.slots = {slot.job for slot in self.slots}, []
            for job in jobs:
                self._call(partial(job.fail, _DIED))
        finally:
            self.loaded = self.work = None
            if loaded.memory is not None and loaded.memory_file is None:
                self._texts = loaded.memory.texts()
            _close(loaded)

    def _decode(self, engine: Engine, learner: Learner | None) -> None:
        while not (self._unloading or self._stopped.is_set()):
            try:
                self._run_commands(engine, engine.idle and not (learner is not None and learner.pending))
                self._end_overdue(engine)
            except Exception as e:  # the engine continues with new requests
                log.exception("the engine failed; its requests end with an error")
                engine.abandon(f"the engine failed: {type(e).__name__}: {e}")
                self._publish(engine)
            began = self.clock()
            if engine.idle:
                if learner is not None and learner.pending and not self._unloading:
                    self.work = began, False
                    learner.work()
                continue
            self.work = began, True
            try:
                engine.step()
            except Exception:  # the requests in the step have ended; the others continue
                log.exception("an engine step failed; its requests end with an error")
            self._publish(engine)
            if learner is not None and learner.may_work((ended := self.clock()) - began):
                self.work = ended, False
                learner.work()
                learner.spent(self.clock() - ended)

    def _lose(self, reason: str) -> None:
        """Handle the loss of another machine. Runs in a thread of the target."""
        log.error("%s", reason)
        self._call(lambda: self._give_up(reason, RanksError(reason)))
        _exit_soon()  # even if the event loop or a client hangs

    def _begin_unloading(self) -> None:
        self._unloading = True
        self.failure = None  # its traceback may reference the model

    def _run_commands(self, engine: Engine, wait: bool) -> None:
        """Run the commands that are there; `wait` for one if there is none."""
        for _ in range(max(wait, self._commands.qsize())):
            self.work = None
            command, _ = self._commands.get()
            self.work = self.clock(), False
            command()
            if self._unloading:
                return

    def _end_overdue(self, engine: Engine) -> None:
        """End overdue requests with their output so far, or with an error if their job has no tokens."""
        now = self.clock()
        if not (overdue := [slot for slot in self.slots if slot.deadline <= now]):
            return
        for slot in overdue:
            begun = any(request.tokens for request in slot.job.requests)
            engine.cut_off(slot.request, TIME, None if begun else NO_TOKEN)
        self._publish(engine)

    def _publish(self, engine: Engine) -> None:
        """Report all changes with one wakeup of the event loop."""
        events: list[tuple[Job, RequestEvent]] = []
        for slot in self.slots:
            request, before = slot.request, slot.reported
            slot.reported = len(request.tokens)
            if slot.reported and not before:
                slot.deadline = min(slot.deadline, self.clock() + slot.job.answer_seconds)
            output = engine.output(request) if request.finish_reason is not None else None
            if output is not None or slot.reported > before:
                parts = request.tokens[before:], request.logprobs[before:], output, request.from_draft[before:]
                events.append((slot.job, RequestEvent(slot.index, *parts, request.texts and request.texts[before:])))
        self.slots = [slot for slot in self.slots if slot.request.finish_reason is None]

        def deliver() -> None:
            for job, event in events:
                job.report(event)

        if events:
            self._call(deliver)

    def _call(self, work: Callable[[], object]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work)

    def _submit(self, job: Job) -> None:
        if self.loaded is None:
            self._call(partial(job.fail, _DIED))
            return
        for index, request in enumerate(job.requests):
            if request.finish_reason is None:
                self.loaded.engine.submit(request)
                self.slots.append(_Slot(request, job, index, job.deadline))

    def _change(self, change: Callable[[Engine], object]) -> None:
        if self.loaded is not None:
            change(self.loaded.engine)
            self._publish(self.loaded.engine)


def _exit_soon() -> None:
    last = Timer(EXIT_SECONDS, os._exit, [1])
    last.daemon = True
    last.start()


def _free_memory() -> None:
    gc.collect()  # models and engines have reference cycles
    mx.clear_cache()


def _close(loaded: Loaded) -> None:
    try:
        loaded.close()
    except Exception:
        log.exception("a model's processes and files could not be closed")
