"""A served model: admission, requests in progress, and totals."""

from __future__ import annotations

import asyncio
import secrets
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from time import perf_counter
from typing import Any, Literal

from eagle_mlx import Output
from eagle_mlx.plan import RoundResult
from eagle_mlx.request_state import RequestState

from .. import log
from .errors import ApiError
from .model import Loaded
from .options import Settings
from .watchdog import Watchdog
from .worker import Job, RequestEvent, Worker

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of histogram buckets: the defaults of Prometheus's Go client, and three for long answers."""


@dataclass
class Histogram:
    buckets: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    """Counts by the bounds above; the last is for longer times."""
    sum: float = 0.0

    def add(self, seconds: float) -> None:
        self.buckets[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds


@dataclass
class Totals:
    """Running totals, and the last depth. The engine counts rounds, the event loop requests: one writer each."""

    rounds: int = 0
    plain_rounds: int = 0
    row_rounds: int = 0  # rounds counted per request: target forwards as a request sees them
    drafts: int = 0  # rounds with drafts, counted per request
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    bonus: int = 0  # tokens that the target added after drafts of which every token was accepted
    forced: int = 0  # accepted tokens that a grammar forced, and guesses between such, which are not draft tokens
    emitted: int = 0
    verify_seconds: float = 0.0
    draft_seconds: float = 0.0
    depth: int = 0
    rounds_by_depth: Counter[int] = field(default_factory=Counter)
    """Rounds by `depth`: the policy's, or that of the early exit."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    first_token: Histogram = field(default_factory=Histogram)
    whole: Histogram = field(default_factory=Histogram)

    def observe(self, result: RoundResult) -> None:
        drafts, draft_seconds = result.drafted_freely, result.draft_seconds or 0.0
        drafted, accepted = sum(drafts), [*map(min, drafts, result.kept)]
        self.rounds += 1
        self.plain_rounds += not result.depth
        self.forced += sum(result.kept) - sum(accepted)
        self.row_rounds += sum(map(bool, result.taken))
        self.emitted += result.emitted
        self.verify_seconds += max(0.0, result.seconds - draft_seconds)
        self.draft_seconds += draft_seconds
        self.depth = result.depth if result.plan.stop_below is not None else result.plan.size
        self.rounds_by_depth[self.depth] += 1
        if not drafted:
            return
        self.drafts += sum(count > 0 for count in drafts)
        self.drafted += drafted
        self.accepted += sum(accepted)
        rows = zip(drafts, result.accepted, result.taken, strict=True)
        self.bonus += sum(0 < count == kept < taken for count, kept, taken in rows)
        new = result.depth - len(self.accepted_by_position)
        self.accepted_by_position += [0] * max(0, new)
        for count in accepted:
            for position in range(count):
                self.accepted_by_position[position] += 1


_RESERVED_SHARE = 8
"""One in this many slots is reserved for clients without requests, so that no client can take all slots."""
State = Literal["unloaded", "loading", "loaded", "unloading", "failed"]


@dataclass(frozen=True)
class ModelSource:
    name: str
    load: Callable[[], Loaded]  # raises EagleError if the model is not available
    max_batch: int = 8
    nbytes: Callable[[], int] = lambda: 0
    """Memory of the loaded model, including its KV cache. Raises what `load` would raise, if the files show it."""


class Service:
    """A served model, loaded or not. Belongs to the event loop."""

    def __init__(self, settings: Settings, source: ModelSource):
        self.settings, self.source = settings, source
        self.name = source.name
        self.totals = Totals()
        self.worker = Worker(source.load, self.totals.observe)
        self.watchdog = Watchdog(self.worker, source.name, settings.stuck_seconds, settings.exit_when_stuck)
        self.started = int(time.time())
        self.last_used = perf_counter()
        self.fingerprint = f"fp_{secrets.token_hex(5)}"
        self.state: State = "unloaded"
        self.on_idle: Callable[[], None] = lambda: None
        self._calls: set[Call] = set()

    @property
    def loaded(self) -> Loaded | None:
        """The model, if requests may use it."""
        return self.worker.loaded if self.state == "loaded" else None

    @property
    def idle(self) -> bool:
        return not self._calls

    @property
    def learns(self) -> bool:
        """Whether its head has something to learn, now that there are no requests."""
        return (loaded := self.loaded) is not None and loaded.learner is not None and loaded.learner.pending

    @property
    def running(self) -> int:
        return loaded.engine.active if (loaded := self.worker.loaded) is not None else 0

    @property
    def waiting(self) -> int:
        """Engine requests that wait for their turn."""
        return max(0, self.slots_taken - self.running)

    @property
    def slots_taken(self) -> int:
        """Slots in use. A finished request holds none, even if its text has not been read."""
        return sum(call.unfinished for call in self._calls)

    @property
    def ranks(self) -> int:
        """Processes that share the model."""
        return loaded.target.ranks if (loaded := self.worker.loaded) is not None else 1

    def admit(self, count: int, client: str = "") -> Call:
        """Admit an HTTP request that needs `count` slots. The model stays loaded for it. Raises ApiError 400 or 429."""
        slots = self.source.max_batch + self.settings.limits.queue
        if count > slots:
            raise ApiError(400, f"the request asks for {count} answers; at most {slots} fit at once", "n")
        has_some = any(call.client == client and call.unfinished for call in self._calls)
        if self.slots_taken + count > slots - (slots // _RESERVED_SHARE if has_some else 0):
            self.totals.requests["refused"] += 1
            log.warning("refused with 429: the queue of model %s is full; client %s", self.name, client or "unknown")
            whole = self.totals.whole  # retry after the mean time of a request
            seconds = max(1, min(60, round(whole.sum / max(1, sum(whole.buckets)))))
            headers = {"Retry-After": str(seconds)}
            raise ApiError(429, "the queue is full; try again later", code="queue_full", headers=headers)
        call = Call(self, count, client)
        self._calls.add(call)
        self.last_used = perf_counter()
        return call

    def release(self, call: Call) -> None:
        self._calls.discard(call)
        self.last_used = perf_counter()
        if self.idle:
            self.on_idle()


class Call(Job):
    """An HTTP request from admission to its last byte."""

    def __init__(self, service: Service, slots: int, client: str):
        super().__init__(service.worker.clock() + (service.settings.limits.request_seconds or inf), slots)
        self.service, self.client = service, client
        self.id = secrets.token_hex(12)
        self.created = int(time.time())
        self.arrived = perf_counter()
        self.first_token: float | None = None
        self.outputs: dict[int, Output] = {}
        self.beginning: asyncio.Future[Any] | None = None  # the task that prepares the requests

    def submit(self, requests: Sequence[RequestState], answer_seconds: float) -> None:
        """answer_seconds: time limit of each request, from its first token."""
        self.requests, self.unfinished = requests, len(requests)
        self.answer_seconds = answer_seconds
        self.service.worker.submit(self)

    async def events(self) -> list[RequestEvent]:
        """Return the pending events of its requests, at least one."""
        events, totals = await super().events(), self.service.totals
        if self.first_token is None and any(event.tokens for event in events):
            self.first_token = perf_counter()
            totals.first_token.add(self.first_token - self.arrived)
        for event in events:
            if event.output is not None:
                self._count(event.index, event.output)
        if self.service.settings.cache_report:
            return events
        return [replace(event, output=event.output and replace(event.output, cached_tokens=0)) for event in events]

    def close(self) -> None:
        """Free its slots, and cancel requests that have not ended."""
        if self.beginning is not None:
            self.beginning.cancel()
        outcome = "refused"
        if self.requests:
            ended = "failed" if any(output.error for output in self.outputs.values()) else "finished"
            outcome = "cancelled" if self.unfinished else ended
            self.service.worker.cancel(self)
            for index, request in enumerate(self.requests):
                if index not in self.outputs:  # the client did not wait for it
                    self._count(index, request.output(None))
        seconds = perf_counter() - self.arrived
        self.service.totals.requests[outcome] += 1
        self.service.totals.whole.add(seconds)
        if self.service.settings.log_requests:
            log.info("request %s to model %s %s: %s", self.id, self.service.name, outcome, self._summary(seconds))
        self.service.release(self)

    def _count(self, index: int, output: Output) -> None:
        self.outputs[index] = output
        self.service.totals.prompt_tokens += output.prompt_tokens
        self.service.totals.cached_tokens += output.cached_tokens

    def _summary(self, seconds: float) -> str:
        outputs = self.outputs.values()
        prompt, cached = sum(o.prompt_tokens for o in outputs), sum(o.cached_tokens for o in outputs)
        tokens, drafted = sum(len(o.tokens) for o in outputs), sum(o.drafted for o in outputs)
        lossy = "" if all(o.lossless for o in outputs) else " (lossy)"
        return (
            f"{prompt} prompt tokens ({cached} cached), {tokens} tokens, "
            f"{sum(o.accepted for o in outputs)} of {drafted} drafts accepted{lossy}, {seconds:.3f} s"
        )
