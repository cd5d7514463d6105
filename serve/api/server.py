"""The application and its server: connections, log, and shutdown with a drain."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from math import inf
from operator import itemgetter
from time import monotonic
from types import FrameType
from typing import Any, Literal

import h11
import uvicorn
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CollectorRegistry
from pydantic.json_schema import models_json_schema
from uvicorn.protocols.http.h11_impl import H11Protocol

from eagle_mlx.command import leave_terminal
from eagle_mlx.errors import ConfigError, in_one_line

from .. import log
from . import chat, completions, messages, metrics, responses, routes, schema
from .errors import SHUTTING_DOWN, add_handlers
from .guard import KeyGuard, RequestGuard
from .limits import Limits
from .models import Models
from .responses_request import ResponsesRequest
from .stored import ResponseMemory

_BODIES: dict[str, type[schema.Body]] = {
    "/v1/chat/completions": schema.ChatRequest,
    "/v1/completions": schema.CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": ResponsesRequest,
    "/v1/messages": messages.MessagesRequest,
    "/v1/messages/count_tokens": messages.CountTokensRequest,
    "/tokenize": routes.TokenizeRequest,
    "/detokenize": routes.DetokenizeRequest,
    "/admin/load": routes.AdminRequest,
    "/admin/unload": routes.AdminRequest,
    "/admin/speculation": routes.SpeculationRequest,
}


def add_schema(app: FastAPI) -> None:
    without_bodies = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = without_bodies()
        components = document.setdefault("components", {}).setdefault("schemas", {})
        named, shared = models_json_schema(
            [(kind, "validation") for kind in _BODIES.values()], ref_template="#/components/schemas/{model}"
        )
        if not app.state.models.settings.strict_fields:  # unknown fields are ignored
            for shape in shared["$defs"].values():
                shape.pop("additionalProperties", None)
        components |= shared["$defs"]
        for path, kind in _BODIES.items():
            content = {"application/json": {"schema": named[(kind, "validation")]}}
            document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation has it


def create_app(models: Models) -> FastAPI:
    """Return an application that serves these models; its startup also starts their threads."""
    settings = models.settings

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        models.start()
        yield
        models.stop()

    app = FastAPI(title="eagle-serve", version="1", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.models = models
    app.state.responses = dict[str, ResponseMemory]()  # by key
    app.state.registry = CollectorRegistry(auto_describe=False)
    app.state.registry.register(metrics.ServerCollector(models))
    add_handlers(app)
    for module in (chat, completions, responses, messages, routes):
        app.include_router(module.router)
    if settings.api_key is not None:
        app.add_middleware(KeyGuard, keys=settings.api_key.split())
    if settings.allow_origin:  # before the key check: browsers send preflight requests without a key
        origins, methods = settings.allow_origin, ["GET", "POST", "DELETE"]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"])
    app.add_middleware(RequestGuard, hosts=settings.hosts)
    add_schema(app)
    return app


Wait = Literal["head", "send", "none"]
_HEADER_LINES = 100  # as Apache's LimitRequestFields
_CHUNKS, _CHUNK_BYTES = 512, 256
"""Chunks of a body, and bytes for each further one. h11 takes 3 microseconds per chunk: 12 ms for a megabyte."""
_PIECE = 1 << 14
"""Bytes that h11 reads at a time. Its limit on the size of a head does not count what arrives in one piece."""
_REFUSED_BYTES = 4e6
"""Bytes per second that are read of a body whose request was answered before: h11 takes 4 ms of CPU for a megabyte, so
eight clients that send refused bodies take an eighth of the event loop."""


class Framing(h11.Connection):
    """A connection's parser, which limits header lines, and the chunks of a body in proportion to its size."""

    requests = 0  # requests so far
    head_begun = True
    """Whether a head is awaited: a connection begins with one, and a later one begins with its first bytes."""
    _chunks = _nbytes = 0

    def receive_data(self, data: bytes) -> None:
        self.head_begun = True
        super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._nbytes += len(event.data)
            if self._chunks > _CHUNKS + self._nbytes // _CHUNK_BYTES:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        elif isinstance(event, h11.Request | h11.EndOfMessage):
            self._chunks = self._nbytes = 0
            self.head_begun = False
            if len(event.headers) > _HEADER_LINES:
                raise h11.RemoteProtocolError("there are too many header lines")
        if isinstance(event, h11.Request):
            self.requests += 1
            headers = [(name, value) for name, value in event.headers if name != b"upgrade"]
            if len(headers) < len(event.headers):  # there are no websockets, and uvicorn would log every attempt
                return h11.Request(method=event.method, target=event.target, headers=headers)
        return event


class Connection(H11Protocol):
    """Uvicorn's connection with our parser. It tracks what it waits for and since when.

    tests/test_uvicorn_contract.py checks what it needs of uvicorn.
    """

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self.conn = self._framing = Framing(h11.SERVER)
        self._waiting: tuple[Wait, int] = "none", 0  # the kind of wait, and a number that changes with progress
        self._since = 0.0

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE):
            if self.transport.is_closing():
                return
            try:
                super().data_received(data[start : start + _PIECE])
            except h11.LocalProtocolError:  # a malformed request cannot be refused after its answer has begun
                self.transport.abort()
        if self._framing.our_state is h11.DONE:  # and the body has not ended
            self.transport.pause_reading()
            self.loop.call_later(len(data) / _REFUSED_BYTES, self.transport.resume_reading)

    @property
    def between_requests(self) -> bool:
        return self._framing.our_state not in (h11.SEND_RESPONSE, h11.SEND_BODY)

    @property
    def is_held(self) -> bool:
        """Whether the client has not sent its whole body, or reads its answer more slowly than it is written."""
        return self._framing.their_state is h11.SEND_BODY or self.flow.write_paused

    def waited(self, now: float) -> tuple[Wait, float]:
        """Return what it waits for from the client, and the seconds without progress.

        Must be called regularly: progress is what changed since the last call.
        """
        unsent = self.transport.get_write_buffer_size()
        waiting: tuple[Wait, int] = "none", 0  # the time of a body is limited where it is read
        is_unread = self.flow.write_paused  # the client reads its answer more slowly than it is written
        if unsent and (self.between_requests or is_unread):
            waiting = "send", unsent
        elif self.between_requests and self._framing.head_begun:  # else uvicorn limits the time to the next request
            waiting = "head", self._framing.requests
        if waiting != self._waiting:
            self._waiting, self._since = waiting, now
        return waiting[0], now - self._since


def close_overdue(connections: Iterable[Connection], limits: Limits, now: float) -> None:
    """Abort connections without progress, and surplus connections, longest idle first."""
    allowed: dict[Wait, float] = {"head": limits.head_seconds, "send": limits.send_seconds, "none": inf}
    kept = []
    for connection in connections:
        wait, seconds = connection.waited(now)
        if seconds > allowed[wait]:
            connection.transport.abort()
        else:
            kept.append((seconds, connection))
    surplus = len(kept) - limits.connections
    if surplus > 0:
        idle = [(seconds, connection) for seconds, connection in kept if connection.between_requests]
        for _, connection in sorted(idle, key=itemgetter(0), reverse=True)[:surplus]:
            connection.transport.abort()


_ABORT_SECONDS = 2.0  # time to send the last answers, such as the errors of aborted ones
_WATCH_SECONDS = 0.1  # interval of checks


class Server(uvicorn.Server):
    """Uvicorn that refuses new requests at the first signal, and ends the others after `drain_seconds` or a second."""

    def __init__(self, app: FastAPI, say: Callable[[str], None] = lambda _: None):
        config = uvicorn.Config(
            app,
            log_level="warning",
            log_config=None,  # its lines go to the common log (`cli.command`)
            access_log=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
            lifespan="on",
            http=Connection,
            ws="none",
            proxy_headers=bool(proxies := app.state.models.settings.forwarded_allow_ips),
            forwarded_allow_ips=proxies,
        )
        super().__init__(config)
        self.connections: set[Any] = self.server_state.connections  # those that are open, all of `Connection`
        self.models: Models = app.state.models
        self._say = say
        self._end = inf  # when requests in progress must have finished

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGHUP:
            signal.signal(sig, signal.SIG_IGN)  # it may come twice
            leave_terminal()
        seconds = 0.0 if self.models.draining else self.models.settings.drain_seconds
        self._end = monotonic() + seconds
        self.models.draining = True

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a model fails, or until the drain after a signal is over."""
        async with asyncio.TaskGroup() as tasks:
            addresses = " ".join(map(address, sockets or []))  # now: a server that stops early closes its sockets
            work = (self._watch(addresses), self._unload_unused(), self._drain())
            watching = list(map(tasks.create_task, work))
            await super().serve(sockets)
            for task in watching:
                task.cancel()

    async def _watch(self, addresses: str) -> None:
        """Check for startup, failures, stuck steps and overdue connections."""
        is_announced = False
        while True:
            if self.models.state == "ready" and not is_announced:
                is_announced = True
                self._say(f"ready: {addresses}")
            for service in self.models.services.values():
                service.watchdog.check()
            self.should_exit |= self.models.failure is not None
            close_overdue(set(self.connections), self.models.settings.limits, monotonic())
            await asyncio.sleep(_WATCH_SECONDS)

    async def _unload_unused(self) -> None:
        while True:
            await self.models.unload_unused()
            await asyncio.sleep(_WATCH_SECONDS)

    @property
    def _held(self) -> list[Connection]:
        return [connection for connection in self.connections if connection.is_held]

    async def _drain(self) -> None:
        """After a signal, wait for requests in progress, end those that remain, and exit."""
        await _until(lambda: self.models.draining)
        log.info("draining: no new requests; those in progress have %.0f s", max(0.0, self._end - monotonic()))
        await _until(lambda: self.models.idle or monotonic() > self._end)
        if not self.models.idle:
            log.info("drain time is over; ending the remaining requests with an error")
            for service in self.models.services.values():
                service.worker.abort_all(SHUTTING_DOWN)
        last = monotonic() + _ABORT_SECONDS
        await _until(lambda: monotonic() > last or (self.models.idle and not self._held))
        for connection in self._held:
            connection.transport.abort()  # uvicorn would wait for it, and report it as an error
        self.should_exit = True


async def _until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(_WATCH_SECONDS)


def address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises ConfigError if the address is not available."""
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        sock = socket.create_server(where, family=family, backlog=2048, dualstack_ipv6=both)
    except (OSError, OverflowError, UnicodeError) as e:
        raise ConfigError(f"cannot listen at --host {host} --port {port}: {in_one_line(e)}; choose others") from e
    # Connections inherit this. asyncio does not set it for sockets without a protocol number, nor for any on macOS
    # (cpython issue 148783). Without it, an event of a stream waits up to 40 ms for the client's acknowledgment of the
    # event before.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
