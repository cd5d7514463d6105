"""The path of an HTTP request, the same for every route: admit, prepare, decode, respond."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from threading import Event
from typing import Any, TypeVar

from fastapi import Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from eagle_mlx import EagleError, Output

from ..log_once import log_once
from . import schema
from .answer import Answer, dumps, failure
from .encoding import Encoder
from .errors import ApiError, Shape, bad_request, client_gone, shortened
from .limits import check_containers, is_long, read_body
from .model import Loaded, check
from .models import Models
from .service import Call, Service
from .validation import B, read

T = TypeVar("T")
R = TypeVar("R", bound=schema.Request)
_UNUSUAL = re.compile(r"[^\w.\[\]-]", re.ASCII)
"""Characters of field names that a header or a log line may not take as they are."""
_MOST_NAMED = 20
"""Ignored fields to name per request: a header has room for them."""
Owner = tuple[str, str]
"""A client, and the namespace of its prefix cache."""


class EventStream(EventSourceResponse):
    """A stream of a call's events. Closes the call when the stream ends, even if it never began."""

    def __init__(self, call: Call, events: AsyncIterator[bytes], keep_alive: Callable[[], ServerSentEvent]):
        seconds = call.service.settings.limits.keep_alive_seconds
        super().__init__(events, sep="\n", ping=seconds, ping_message_factory=keep_alive)
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.close()


def models_of(request: Request) -> Models:
    models: Models = request.app.state.models
    return models


def client_of(request: Request) -> str:
    """Return the client's address for fair scheduling; clients may share a key."""
    return request.client.host if request.client is not None else ""


def owner_of(request: Request) -> Owner:
    """Return the owner of a request: its client, and a prefix cache for its key and `cache_salt`.

    Requests without either share one. The body must have been read.
    """
    key, salt = getattr(request.state, "key", None), request.state.cache_salt
    namespace = "" if key is None and salt is None else json.dumps([key, salt])
    return client_of(request), namespace


def json_response(body: Any, status: int = 200) -> Response:
    """Return plain values or a shape as JSON."""
    plain = body.plain() if isinstance(body, Shape) else body
    return Response(dumps(plain), status, media_type="application/json")


async def body_of(request: Request, kind: type[B]) -> B:
    """Return the parsed and validated body. Raises ApiError."""
    models = models_of(request)
    models.check_open()  # a server that takes no requests does not read bodies
    limits = models.settings.limits
    body = await read_body(request, limits)
    request.state.size, request.state.is_long = len(body), is_long(body, limits)

    def parse() -> tuple[B, list[str]]:
        check_containers(body, limits)
        return read(kind, body, models.settings.strict_fields)

    found, ignored = await in_turn(request, parse)
    if ignored:
        names = (_UNUSUAL.sub("?", shortened(name, 100)) for name in ignored[:_MOST_NAMED])
        request.state.ignored_fields = ", ".join(names)
        said = f"ignored unknown fields: {request.state.ignored_fields}; --strict-fields refuses them"
        log_once(f"{request.url.path}: {said}")
    request.state.cache_salt = getattr(found, "cache_salt", None)
    return found


async def in_turn(request: Request, work: Callable[[], T]) -> T:
    """Run work that takes time in proportion to the body: at once if it is short, else in a thread, clients in turn.

    The body must have been read. Raises what `work` raises, and ApiError 499.
    """
    if not request.state.is_long:
        return work()
    return await unless_disconnected(request, models_of(request).pools.parse(work, client_of(request)))


async def read_request(request: Request, kind: type[R]) -> tuple[R, Service]:
    """Return the validated body and the service of its model. Raises ApiError."""
    body = await body_of(request, kind)
    service = models_of(request).named(body.model)
    check(body, service.settings.limits)
    return body, service


async def in_thread(request: Request, loaded: Loaded, work: Callable[[Encoder], T], has_schema: bool = False) -> T:
    """Run `work` in a thread, with a function that encodes texts until this is canceled.

    The body must have been read. Library errors become ApiError 400.
    """
    cancelled = Event()

    def run(pause: Callable[[], None]) -> T:
        def check() -> None:
            pause()
            if cancelled.is_set():
                raise client_gone()

        return work(Encoder(loaded.tokenizer, check))

    try:
        pools = models_of(request).pools
        return await pools.encode(run, request.state.size, client_of(request), has_schema)
    except EagleError as e:
        raise bad_request(e) from e
    finally:
        cancelled.set()


async def respond(
    request: Request, service: Service, answer: Answer, body: schema.Extensions, stream: bool | None, slots: int = 1
) -> Response:
    """Serve a request that needs `slots` slots of a model, as one body or as a stream.

    A stream begins with its answer, or after `keep_alive_seconds` if the answer takes longer, for example while the
    model loads.
    """
    answer.call = call = service.admit(slots, client_of(request))
    call.beginning = beginning = asyncio.ensure_future(_begin(request, call, answer, body.answer_seconds))
    streaming = False
    try:
        if stream:
            await unless_disconnected(
                request, asyncio.wait({beginning}, timeout=service.settings.limits.keep_alive_seconds)
            )
            if beginning.done():
                beginning.result()  # raises its error
            events = answer.stream() if beginning.done() else _later(beginning, answer)
            streaming = True
            return EventStream(call, events, answer.keep_alive)
        await unless_disconnected(request, beginning)
        outputs = await unless_disconnected(request, finished(call))
        if error := failure(outputs):
            call.failed = True
            raise error
        return json_response(answer.response(outputs))
    finally:
        if not streaming:
            call.close()


async def respond_encoded(request: Request, model: str | None, work: Callable[[Loaded, Encoder], Shape]) -> Response:
    """Run `work` in a queue slot and serialize its result in the same thread, because both may be slow."""
    service = models_of(request).named(model)

    async def answer() -> Response:
        loaded = await models_of(request).loaded(service)
        return await in_thread(request, loaded, lambda encode: json_response(work(loaded, encode)))

    with service.encoding(client_of(request)):
        return await unless_disconnected(request, answer())


async def _begin(request: Request, call: Call, answer: Answer, answer_seconds: float) -> None:
    await answer.prepare(request, call, await models_of(request).loaded(call.service))
    call.submit(answer.requests, answer_seconds)


async def _later(beginning: asyncio.Future[None], answer: Answer) -> AsyncIterator[bytes]:
    """Yield the events of an answer that begins after its stream."""
    yield answer.keep_alive().encode()
    try:
        await beginning
    except ApiError as e:
        yield answer.error_event(e)
        return
    async for event in answer.stream():
        yield event


async def finished(call: Call) -> list[Output]:
    """Wait for all requests of a call and return their outputs in order."""
    outputs: dict[int, Output] = {}
    while len(outputs) < len(call.requests):
        outputs |= {event.index: event.output for event in await call.events() if event.output is not None}
    return [outputs[index] for index in range(len(outputs))]


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. Raises ApiError 499 if the client disconnects first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise client_gone()
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
