"""The path of a request whose body was read, the same for every route: admit, prepare, decode, respond."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .answer import Answer, PendingAnswer, dumps
from .encoding import Encoder
from .errors import ApiError, Shape
from .model import Loaded
from .received import Received, client_of, models_of, unless_disconnected
from .service import Call, Service


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


def json_response(body: Any, status: int = 200) -> Response:
    """Return plain values or a shape as JSON."""
    plain = body.plain() if isinstance(body, Shape) else body
    return Response(dumps(plain), status, media_type="application/json")


async def respond(
    received: Received[Any], service: Service, make: Callable[[Call], PendingAnswer], slots: int = 1
) -> Response:
    """Serve a request that needs `slots` slots of a model, as one body or as a stream.

    A stream begins with its answer, or after `keep_alive_seconds` if the answer takes longer, for example while the
    model loads.
    """
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
        return json_response(await unless_disconnected(request, answer.whole()))
    finally:
        if not streaming:
            call.close()


async def respond_encoded(received: Received[Any], work: Callable[[Loaded, Encoder], Shape]) -> Response:
    """Run `work` in a queue slot and serialize its result in the same thread, because both may be slow."""
    models = models_of(received.http)
    service = models.named(received.body.model)

    async def answer() -> Response:
        loaded = await models.loaded(service)
        return await received.in_thread(loaded, lambda encode: json_response(work(loaded, encode)))

    call = service.admit(1, client_of(received.http))
    try:
        return await unless_disconnected(received.http, answer())
    finally:
        service.release(call)


async def _begin(received: Received[Any], pending: PendingAnswer) -> Answer:
    call = pending.call
    answer = await pending.prepare(received, await models_of(received.http).loaded(call.service))
    call.submit(answer.requests, received.body.answer_seconds)
    return answer


async def _later(pending: PendingAnswer, beginning: asyncio.Future[Answer]) -> AsyncIterator[bytes]:
    """Yield the events of an answer that begins after its stream."""
    yield pending.keep_alive().encode()
    try:
        answer = await beginning
    except ApiError as e:
        yield pending.fail(e)
        return
    async for event in answer.stream():
        yield event
