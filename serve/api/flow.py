"""An HTTP request's way through the worker, the same for every route: admit, prepare, decode, respond."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from threading import Event
from typing import Any, Literal, Protocol, TypeVar

from fastapi import Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from eagle_mlx.engine.output import Output
from eagle_mlx.errors import EagleError
from eagle_mlx.request import Request as EngineRequest

from . import schema
from .answer import failure
from .encoder import Encode
from .errors import ApiError, bad_request
from .limits import read_body
from .model import Loaded
from .sampling import check
from .schema import B, read
from .service import Call, Service

T = TypeVar("T")
R = TypeVar("R", bound=schema.Request)
KEEP_ALIVE_SECONDS = 15
"""Between signs of life in a stream: the HTML standard advises one about every 15 seconds (9.2.7)."""
COMMENT = ServerSentEvent(comment="waiting", sep="\n")
"""A sign of life that every reader of events drops."""


class Answer(Protocol):
    """What a route makes of a request before it decodes."""

    @property
    def requests(self) -> Sequence[EngineRequest]: ...

    def response(self, call: Call, outputs: Sequence[Output]) -> dict[str, Any]:
        """The whole, once all requests have ended."""
        ...

    def stream(self, call: Call) -> AsyncIterator[bytes]:
        """The chunks, as server-sent events."""
        ...


class EventStream(EventSourceResponse):
    """Events of a call, which ends with them however they end: read, cut off, or never begun."""

    def __init__(self, call: Call, events: AsyncIterator[bytes], ping: ServerSentEvent):
        super().__init__(events, sep="\n", ping=KEEP_ALIVE_SECONDS, ping_message_factory=lambda: ping)
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.close()


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def client_of(request: Request) -> str:
    """Who asks, for taking turns. There is one key for all, so it is the address that tells clients apart."""
    return request.client.host if request.client is not None else ""


def json_response(body: Any, status: int = 200) -> Response:
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text, status, media_type="application/json")


async def body_of(request: Request, kind: type[B]) -> B:
    """The body of a request, read and checked. Raises ApiError."""
    service = service_of(request)
    body = await read_body(request, service.settings.limits)
    request.state.size = len(body)
    unknown: Literal["forbid", "ignore"] = "ignore" if service.settings.ignore_unknown_fields else "forbid"
    return await service.pools.read(lambda: read(kind, body, unknown), len(body))


async def read_request(request: Request, kind: type[R]) -> tuple[R, Loaded]:
    """The body, within the limits, and the model that it is for. Raises ApiError."""
    service = service_of(request)
    service.loaded()  # a server that takes no requests does not read their bodies
    body = await body_of(request, kind)
    loaded = service.loaded(body.model)
    check(body, service.settings.limits)
    return body, loaded


async def in_thread(request: Request, loaded: Loaded, work: Callable[[Encode], T], has_schema: bool = False) -> T:
    """Do what may take a while beside the event loop, with what encodes the texts of this request.

    When this is cancelled, the encoding of a long text is, too. The body must have been read. What the library refuses
    comes back as ApiError 400.
    """
    pools, client = service_of(request).pools, client_of(request)
    long, cancelled = service_of(request).settings.limits.long_bytes, Event()

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        return loaded.encoder.encode(text, add_special_tokens, len(text) >= long, cancelled)

    try:
        return await pools.encode(lambda: work(encode), request.state.size, client, has_schema)
    except EagleError as e:
        raise bad_request(e) from e
    finally:
        cancelled.set()


async def respond(
    request: Request,
    slots: int,
    prepare: Callable[[Call], Awaitable[Answer]],
    stream: bool,
    ping: ServerSentEvent = COMMENT,
) -> Response:
    """Serve a request that needs so many slots, whole or as a stream.

    ping: what a stream sends while nothing is to be said, so that nobody takes a long prompt for a dead connection.
    """
    call = service_of(request).admit(slots, client_of(request))
    streaming = False
    try:
        answer = await unless_disconnected(request, prepare(call))
        call.submit(answer.requests)
        if stream:
            streaming = True
            return EventStream(call, answer.stream(call), ping)
        outputs = await unless_disconnected(request, finished(call))
        if error := failure(outputs):
            call.failed = True
            raise error
        return json_response(answer.response(call, outputs))
    finally:
        if not streaming:
            call.close()


async def finished(call: Call) -> list[Output]:
    """Wait for all requests of a call, whose outputs come in their order."""
    assert call.job is not None
    outputs: dict[int, Output] = {}
    while len(outputs) < len(call.job.requests):
        outputs |= {event.index: event.output for event in await call.events() if event.output is not None}
    return [outputs[index] for index in range(len(outputs))]


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Wait for `work`, but no longer than for the client. Raises ApiError where it has left; nobody reads it."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError(499, "the client has closed the connection")
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
