"""The application and the server that runs it: connections, the log, and the end, which is a drain unless the one model
is lost.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from time import monotonic
from types import FrameType
from typing import Any, Literal, TextIO

import uvicorn
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from pydantic.json_schema import models_json_schema
from uvicorn.protocols.http.h11_impl import H11Protocol

from eagle_mlx.errors import ConfigError

from . import chat, completions, metrics, routes
from .errors import add_handlers
from .guard import ForwardedFor, FramingGuard, HostGuard, KeyGuard, RequestForms
from .limits import Limits, Threads
from .messages.answer import router as messages
from .messages.schema import CountTokensRequest, MessagesRequest
from .models import Models
from .responses.answer import ResponseMemory
from .responses.route import router as responses
from .responses.schema import ResponsesRequest
from .schema import AdminRequest, Body, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/admin/load": AdminRequest,
    "/admin/unload": AdminRequest,
}

_LINKS: dict[str, dict[str, tuple[str, str, dict[str, Any]]]] = {
    "/v1/responses": {
        "read": ("/v1/responses/{id}", "get", {"parameters": {"id": "$response.body#/id"}}),
        "forget": ("/v1/responses/{id}", "delete", {"parameters": {"id": "$response.body#/id"}}),
        "go on": (
            "/v1/responses",
            "post",
            {"requestBody": {"input": "Go on.", "previous_response_id": "$response.body#/id"}},
        ),
    },
}
"""What can be done with an answer of a POST route: path, method, and what to send there."""


def add_schema(app: FastAPI, models: Sequence[str]) -> None:
    """Let the app's schema tell what its POST routes take, for models of these names; the only one may be left out."""
    without_bodies = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        schema = without_bodies()
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        named, shared = models_json_schema(
            [(kind, "validation") for kind in _BODIES.values()], ref_template="#/components/schemas/{model}"
        )
        components |= shared["$defs"]
        for kind in _BODIES.values():
            body = components[kind.__name__]
            if len(models) == 1 and not kind.model_fields["model"].is_required():
                body["properties"]["model"] = {"enum": [*models, None], "default": None}
            else:
                body["properties"]["model"] = {"enum": list(models)}
                body["required"] = sorted({*body.get("required", ()), "model"})
        for path, kind in _BODIES.items():
            content = {"application/json": {"schema": named[(kind, "validation")]}}
            schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        for path, links in _LINKS.items():
            schema["paths"][path]["post"]["responses"]["200"]["links"] = {
                name: {"operationId": schema["paths"][to][method]["operationId"], **sent}
                for name, (to, method, sent) in links.items()
            }
        return schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation has it


ROUTERS = (chat.router, completions.router, responses, messages, routes.router)


def create_app(models: Models) -> FastAPI:
    """An application that serves these models; its start also starts their threads."""
    settings = models.settings

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_default_executor(Threads(thread_name_prefix="request"))
        models.start()
        yield
        models.stop()

    app = FastAPI(title="eagle-serve", version="1", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.models = models
    app.state.responses = ResponseMemory(settings.limits.responses, settings.limits.response_bytes)
    app.state.registry = metrics.registry(models)
    add_handlers(app)
    for router in ROUTERS:
        app.include_router(router)
    if settings.api_key is not None:
        app.add_middleware(KeyGuard, keys=settings.api_key.split())
    if settings.origins:  # outside of the guard: browsers ask first without a key
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"]
        )
    if settings.hosts is not None:
        app.add_middleware(HostGuard, allowed=settings.hosts)
    app.add_middleware(FramingGuard)
    if settings.forwarded_allow_ips:
        app.add_middleware(ForwardedFor, trusted=settings.forwarded_allow_ips)
    app.add_middleware(RequestForms)  # the outermost: the guards read the path and the host
    add_schema(app, list(models.services))
    return app


Wait = Literal["head", "send", "none"]


class Connection(H11Protocol):
    """Uvicorn's connection, which knows what it is waiting for and since when."""

    _waiting: tuple[Any, ...] = ("none",)
    _since = 0.0

    def waited(self, now: float) -> tuple[Wait, float]:
        """What of the client's this waits for, and the seconds since there was any progress.

        Must be asked regularly, because progress is what has changed since it was last asked.
        """
        waiting = self._wait()
        if waiting != self._waiting:
            self._waiting, self._since = waiting, now
        return waiting[0], now - self._since

    @property
    def between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> tuple[Any, ...]:
        """The kind of wait, and what changes with progress."""
        unsent = self.transport.get_write_buffer_size()
        if unsent and (self.between_requests or self.flow.write_paused):
            return "send", unsent
        if self.between_requests and self.timeout_keep_alive_task is None:  # else uvicorn's own time is running
            return "head", id(self.cycle)
        return ("none",)  # a body's time is measured where it is read

    def _should_upgrade(self) -> bool:
        """There are no websockets here, and nothing to be said of it in the log for everyone who asks."""
        return False


def close_overdue(connections: Iterable[Connection], limits: Limits, now: float) -> None:
    """Cut off connections that make no progress, and those beyond the limit that have waited longest for a request.

    Aborted, not closed: closing would wait until what is unsent has been read.
    """
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
        idle = [each for each in kept if each[1].between_requests]
        for _, connection in sorted(idle, key=lambda each: each[0], reverse=True)[:surplus]:
            connection.transport.abort()


_LAST_WORDS = 2.0
"""Seconds that answers which were cut off have for being sent."""


class Server(uvicorn.Server):
    """Uvicorn with an end in order: at the first signal new requests are refused while those under way finish.

    After `drain_seconds`, or at a second signal, those that are left end with an error.
    """

    def __init__(
        self, app: FastAPI, say: Callable[[str], None] = lambda _: None, note: Callable[[str], None] = lambda _: None
    ):
        """say: told when it is ready. note: told what happens later."""
        config = uvicorn.Config(
            app,
            log_level="warning",
            log_config=None,  # its lines go where all others go (`LogHandler`)
            access_log=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
            lifespan="on",
            http=Connection,
            ws="none",
            proxy_headers=False,  # `guard.ForwardedFor` reads them, if an operator wants that
        )
        super().__init__(config)
        self.models: Models = app.state.models
        self._say, self._note = say, note
        self._announced = False
        self._end: float | None = None
        """When what is under way must have finished."""
        self._draining = False
        self._abandoned = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        seconds = self.models.settings.drain_seconds if self._end is None else 0.0
        self._end = monotonic() + seconds
        self.models.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn every tenth of a second."""
        if self.models.state == "ready" and not self._announced:
            self._announced = True
            self._say(f"ready: {' '.join(self._addresses())}")
        if self.models.failure is not None:
            self.should_exit = True
        elif self._end is not None:
            self._drain(monotonic())
        open_now = [each for each in self.server_state.connections if isinstance(each, Connection)]
        close_overdue(open_now, self.models.settings.limits, monotonic())
        return await super().on_tick(counter)

    def _drain(self, now: float) -> None:
        assert self._end is not None
        if not self._draining:
            self._draining = True
            self._note(f"draining: no new requests; those under way have {max(0.0, self._end - now):.0f} s")
        if self.models.idle or now > self._end + _LAST_WORDS:
            self.should_exit = True
        elif now > self._end and not self._abandoned:
            self._abandoned = True
            self._note("the time to drain is over; requests under way end with an error")
            self.models.abort_all("the server is shutting down")

    def _addresses(self) -> list[str]:
        sockets = [sock for server in self.servers for sock in server.sockets]
        return [address(sock) for sock in sockets]


def address(sock: socket.socket) -> str:
    """A listening socket as a URL."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """A socket at an address. Raises ConfigError where it cannot be had."""
    if not 0 <= port < 65536:
        raise ConfigError(f"--port must be from 0 to 65535; got {port}")
    try:
        family, kind, proto, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(2048)
        except OSError:
            sock.close()
            raise
    except (OSError, OverflowError, UnicodeError) as e:
        raise ConfigError(f"cannot listen at --host {host} --port {port}: {e}; name another") from e
    return sock


def run(server: Server, sock: socket.socket) -> None:
    """Serve until the end. Raises what has become of a model without which it ends."""
    server.run(sockets=[sock])
    failure = server.models.failure
    if failure is not None:
        raise failure


FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
TIME = "%Y-%m-%dT%H:%M:%S%z"
PERIOD = 60.0
"""Seconds in which a line that repeats is counted, and not written."""
_MOST_LINES = 256
"""Different lines of a period. Beyond them, lines that differ in their details count as the same."""
_Line = tuple[str, int, str, str]


@dataclass
class _Repeats:
    until: float
    """When the period ends, by the handler's clock."""
    count: int = 0


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes a line once, then once a period how often it was repeated."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        super().__init__(stream if stream is not None else sys.stderr)
        self.setFormatter(logging.Formatter(FORMAT, TIME))
        self._clock = clock
        self._lines: dict[_Line, _Repeats] = {}

    def emit(self, record: logging.LogRecord) -> None:
        now = self._clock()
        self._end_periods(now)
        line = self._line(record)
        if line in self._lines:
            self._lines[line].count += 1
            return
        self._lines[line] = _Repeats(now + PERIOD)
        super().emit(record)

    def close(self) -> None:
        """Write the counts that are left."""
        self.acquire()
        try:
            self._end_periods(float("inf"))
        finally:
            self.release()
        super().close()

    def _line(self, record: logging.LogRecord) -> _Line:
        error = record.exc_info[1] if record.exc_info else None
        line = (record.name, record.levelno, record.getMessage(), "" if error is None else repr(error)[:200])
        if len(self._lines) < _MOST_LINES or line in self._lines:
            return line
        return record.name, record.levelno, str(record.msg), ""

    def _end_periods(self, now: float) -> None:
        for line, repeats in list(self._lines.items()):
            if now < repeats.until:
                continue
            del self._lines[line]
            if repeats.count:
                name, level, text, error = line
                said = f"{text}{f' ({error})' if error else ''}; repeated {repeats.count} times in {PERIOD:.0f} s"
                super().emit(logging.LogRecord(name, level, "", 0, said, None, None))
                self._lines[line] = _Repeats(now + PERIOD)


def set_up_log() -> None:
    """Write the log of this process to stderr: warnings of all libraries, and what the server says of itself."""
    logging.basicConfig(handlers=[LogHandler()], level=logging.WARNING)
    logging.getLogger("eagle_mlx").setLevel(logging.INFO)
