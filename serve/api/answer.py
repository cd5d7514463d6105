"""Answers: a request's way from its admission to its last byte, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import starmap
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from eagle_mlx.request import Output, draft_runs
from eagle_mlx.request_state import RequestState

from .encoding import Encoder
from .errors import SHUTTING_DOWN, ApiError, shutting_down, timed_out
from .metrics import stats
from .model import Loaded
from .received import Received, client_of, models_of, unless_disconnected
from .schema import SERVICE_TIER, ChoicesRequest, EventFormat
from .service import Call, Service
from .worker import TIME, RequestEvent

DONE = b"data: [DONE]\n\n"
dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def data_event(fields: dict[str, Any]) -> str:
    return f"data: {dumps(fields)}\n\n"


def named_event(fields: dict[str, Any]) -> str:
    return f"event: {fields['type']}\n{data_event(fields)}"


def failure(outputs: Sequence[Output]) -> ApiError | None:
    """Return the error of the first request that failed."""
    for output in outputs:
        if output.error is not None and output.cut_off == TIME:
            return timed_out()
        if output.error == SHUTTING_DOWN:
            return shutting_down()
        if output.error is not None:
            return ApiError(400 if output.refused else 500, output.error, code="generation_failed")
    return None


class PendingAnswer(ABC):
    """A request from its admission until its answer can begin, which may wait for the model."""

    def __init__(self, call: Call, options: EventFormat | None = None):
        self.call, own = call, options.per_token if options is not None else None
        self.per_token = call.service.settings.stream_per_token if own is None else own
        """Whether a stream has an event for each token, as the request or else the server says."""

    @abstractmethod
    async def prepare(self, received: Received[Any], loaded: Loaded) -> Answer:
        """Make the engine requests. Raises ApiError."""

    @abstractmethod
    def keep_alive(self) -> ServerSentEvent:
        """Return an event that says nothing, for clients that end a stream without events. Also used later."""

    def fail(self, error: ApiError) -> bytes:
        """Return the end of a stream that fails, now or later."""
        return data_event(error.body).encode() + DONE


class Answer(ABC):
    """The answer to engine requests."""

    def __init__(self, pending: PendingAnswer, requests: Sequence[RequestState]):
        self.pending, self.requests = pending, requests
        self.call = pending.call

    @abstractmethod
    def response(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return the whole answer after all requests have ended."""

    @abstractmethod
    def open(self) -> str:
        """Return the events before the first token."""

    @abstractmethod
    def write(self, event: RequestEvent) -> str:
        """Return the events of a step of one request, or of a part of the step."""

    @abstractmethod
    def close(self, index: int, output: Output, more: dict[str, Any]) -> str:
        """Return the last events of one request. more: timings and metrics, if all requests have ended."""

    def end_stream(self, outputs: Sequence[Output]) -> bytes:
        """Return what follows all answers."""
        return b""

    def pieces(self, event: RequestEvent) -> Sequence[slice]:
        """Return the tokens of a step that are written at once."""
        size = 1 if self.pending.per_token else max(1, len(event.tokens))
        return [slice(start, start + size) for start in range(0, max(1, len(event.tokens)), size)]

    async def whole(self) -> dict[str, Any]:
        """Wait for the whole answer. Raises ApiError if a request failed."""
        outputs: dict[int, Output] = {}
        while len(outputs) < len(self.requests):
            outputs |= {event.index: event.output for event in await self.call.events() if event.output is not None}
        ordered = [outputs[index] for index in range(len(outputs))]
        if error := failure(ordered):
            raise error
        return self.response(ordered)

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events; those that are ready together are sent together."""
        if opening := self.open():
            yield opening.encode()
        outputs: dict[int, Output] = {}
        while len(outputs) < len(self.requests):
            text = ""
            for event in await self.call.events():
                if event.output is not None and (error := failure([event.output])):
                    yield text.encode() + self.pending.fail(error)
                    return
                text += "".join(self.write(event.part(part)) for part in self.pieces(event))
                if event.output is not None:
                    outputs[event.index] = event.output
                    is_last = len(outputs) == len(self.requests)
                    more = stats(self.call, list(outputs.values())) if is_last else {}
                    text += self.close(event.index, event.output, more)
            if text:
                yield text.encode()
        if last := self.end_stream([outputs[index] for index in range(len(outputs))]):
            yield last


class PendingChoices(PendingAnswer):
    """A request of OpenAI's older routes, whose answers are choices."""

    prefix: str  # the beginning of an answer's id
    kind: str  # the field `object` of a body, and below of a chunk
    chunk_kind: str
    nothing: Mapping[str, Any]  # the fields of a choice in a chunk without text

    def __init__(self, call: Call, body: ChoicesRequest):
        super().__init__(call, body.stream_options)
        self.body = body

    def keep_alive(self) -> ServerSentEvent:
        choice = {"index": 0, **self.nothing, "logprobs": None, "finish_reason": None}
        return ServerSentEvent(dumps(self.chunk([choice])), sep="\n")

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        usage: dict[str, Any] = {"usage": None} if self.body.usage_wanted else {}
        return self.with_choices(self.chunk_kind, choices, **usage | more)

    def with_choices(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return a body or a chunk, with the fields that all of them have."""
        service = self.call.service
        named = {"id": f"{self.prefix}-{self.call.id}", "object": kind, "created": self.call.created}
        tier = {"service_tier": SERVICE_TIER} if self.body.service_tier is not None else {}
        named |= {"model": service.name, "system_fingerprint": service.fingerprint, **tier}
        return {**named, "choices": choices, **more}


class Choices(Answer):
    """An answer of OpenAI's older routes: choices, as one body or in chunks."""

    def __init__(self, pending: PendingChoices, requests: Sequence[RequestState]):
        super().__init__(pending, requests)
        self._form = pending
        self._drafted: Counter[int] = Counter()  # accepted draft tokens of each choice that no chunk has reported yet

    @abstractmethod
    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """Return a whole choice."""

    @abstractmethod
    def extend(self, event: RequestEvent) -> str:
        """Return the chunks of a step, or of a part of it."""

    def thought_tokens(self, index: int, output: Output) -> int:
        """Count the tokens of a whole choice's reasoning."""
        return 0

    def response(self, outputs: Sequence[Output]) -> dict[str, Any]:
        choices = list(starmap(self.choice, enumerate(outputs)))
        usage = self._usage(outputs)
        return self._form.with_choices(self._form.kind, choices, usage=usage, **stats(self.call, outputs))

    def pieces(self, event: RequestEvent) -> Sequence[slice]:
        """Return the tokens of a step that are written at once: if requested, accepted draft tokens are separate."""
        if self.pending.per_token or not self._form.body.drafts_wanted:
            return super().pieces(event)
        return [part for part, _ in draft_runs(event.from_draft)]

    def write(self, event: RequestEvent) -> str:
        self._drafted[event.index] += sum(event.from_draft)
        return self.extend(event)

    def chunk(self, index: int, piece: dict[str, Any], logprobs: Any = None, finish: Any = None, **more: Any) -> str:
        """Return a chunk of a choice. piece: the choice's own field. more: further fields of the chunk."""
        if self._form.body.drafts_wanted:
            more = {"draft_n_accepted": self._drafted.pop(index, 0), **more}
        choice = {"index": index, **piece, "logprobs": logprobs, "finish_reason": finish}
        return data_event(self._form.chunk([choice], **more))

    def end_stream(self, outputs: Sequence[Output]) -> bytes:
        if not self._form.body.usage_wanted:
            return DONE
        last = self._form.chunk([], usage=self._usage(outputs), **stats(self.call, outputs))
        return data_event(last).encode() + DONE

    def _usage(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Count tokens. If a prompt has several answers, its tokens count once."""
        firsts = outputs[:: self._form.body.answers]
        prompt, completion = sum(o.prompt_tokens for o in firsts), sum(len(o.tokens) for o in outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(o.cached_tokens for o in firsts)},
            "completion_tokens_details": {"reasoning_tokens": sum(starmap(self.thought_tokens, enumerate(outputs)))},
        }


class EventStream(EventSourceResponse):
    """A stream of a call's events. Closes the call when the stream ends, even if it never began."""

    def __init__(self, call: Call, events: AsyncIterator[bytes], keep_alive: Callable[[], ServerSentEvent]):
        seconds: Any = call.service.settings.limits.keep_alive_seconds  # sse-starlette 3.0 declares int, and takes any
        super().__init__(events, sep="\n", ping=seconds, ping_message_factory=keep_alive)
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.close()


async def respond(
    received: Received[Any], service: Service, make: Callable[[Call], PendingAnswer], slots: int = 1
) -> Response:
    """Serve a request that needs `slots` slots, as one body, or as a stream that begins in `keep_alive_seconds`."""
    request = received.http
    call = service.admit(slots, client_of(request))
    streaming = False
    try:
        pending = make(call)
        call.beginning = beginning = asyncio.ensure_future(_begin(received, pending))
        if received.body.stream:
            await unless_disconnected(
                request, asyncio.wait({beginning}, timeout=service.settings.limits.keep_alive_seconds)
            )
            events = beginning.result().stream() if beginning.done() else _later(pending, beginning)
            streaming = True
            return EventStream(call, events, pending.keep_alive)
        answer = await unless_disconnected(request, beginning)
        return JSONResponse(await unless_disconnected(request, answer.whole()))
    finally:
        if not streaming:
            call.close()


async def respond_encoded(received: Received[Any], work: Callable[[Loaded, Encoder], object]) -> Response:
    """Run `work` in a queue slot and serialize its result in the same thread, because both may be slow."""
    models = models_of(received.http)
    service = models.named(received.body.model)

    async def answer() -> Response:
        loaded = await models.loaded(service)
        return await received.in_thread(loaded, lambda encode: JSONResponse(work(loaded, encode)))

    call = service.admit(1, client_of(received.http))
    try:
        return await unless_disconnected(received.http, answer())
    finally:
        service.release(call)


async def _begin(received: Received[Any], pending: PendingAnswer) -> Answer:
    call = pending.call
    try:
        async with asyncio.timeout(call.service.settings.limits.request_seconds):
            answer = await pending.prepare(received, await models_of(received.http).loaded(call.service))
    except TimeoutError as e:
        raise timed_out() from e
    call.submit(answer.requests, received.body.answer_seconds)
    return answer


async def _later(pending: PendingAnswer, beginning: asyncio.Future[Answer]) -> AsyncIterator[bytes]:
    yield pending.keep_alive().encode()
    try:
        answer = await beginning
    except ApiError as e:
        yield pending.fail(e)
        return
    async for event in answer.stream():
        yield event
