"""The running server: it tells when it is ready, drains when it is told to end, and ends when the one model is lost."""

from __future__ import annotations

import socket
from collections.abc import Callable
from time import monotonic
from types import FrameType

import uvicorn
from fastapi import FastAPI

from eagle_mlx.errors import ConfigError

from .connection import Connection, close_overdue
from .models import Models

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
            log_config=None,  # its lines go where all others go (`log.py`)
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
