"""What `serve/api/server.py` needs of uvicorn beyond its documentation. If a test fails, uvicorn has changed.

Without the parser of its own, the server has no limits on framing, and connections that send or read nothing stay
open; those are among the connections that uvicorn counts, and it knows to which it cannot write. Without the error, a
malformed request whose answer has begun leaves a traceback instead of a closed connection.
Without `handle_exit`, SIGTERM ends requests instead of letting them finish.
"""

from __future__ import annotations

import asyncio
import signal
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from eagle_mlx.serve.api.server import listen

POST = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


class Replaced(H11Protocol):
    """A connection with another parser. Keeps the errors that its parser raises when it writes."""

    def __init__(self, made: list[Replaced], **more: Any):
        super().__init__(**more)
        self.conn = self.parser = h11.Connection(h11.SERVER)
        self.errors: list[h11.LocalProtocolError] = []
        made.append(self)

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except h11.LocalProtocolError as e:
            self.errors.append(e)
            self.transport.abort()


async def begin(scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
    """Begin an answer at once, and end it after the body."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x", "more_body": True})
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.body", "body": b""})


def serve(talk: Callable[[Replaced, StreamReader, StreamWriter], Awaitable[None]]) -> None:
    """Talk to a server over a connection after the beginning of its first answer."""

    async def run() -> None:
        made = list[Replaced]()
        http: Any = partial(Replaced, made)
        server = uvicorn.Server(uvicorn.Config(begin, http=http, lifespan="off", log_config=None, ws="none"))
        with listen("127.0.0.1", 0) as sock:
            serving = asyncio.ensure_future(server.serve([sock]))
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(POST)
            await reader.readuntil(b"1\r\nx\r\n")
            [connection] = made
            await talk(connection, reader, writer)
            writer.close()
            server.should_exit = True
            await serving

    asyncio.run(run())


def test_a_connection_reads_and_writes_with_the_parser_set_in_its_constructor() -> None:
    async def talk(connection: Replaced, reader: StreamReader, writer: StreamWriter) -> None:
        for _ in range(2):
            assert connection.parser.our_state is h11.SEND_BODY
            writer.write(b"0\r\n\r\n")
            await reader.readuntil(b"0\r\n\r\n")
            assert connection.parser.our_state is h11.IDLE
            writer.write(POST)
            await reader.readuntil(b"1\r\nx\r\n")

    serve(talk)


def test_open_connections_are_known_and_which_of_them_are_not_read() -> None:
    opened: set[Any] = set()

    async def talk(connection: Replaced, reader: StreamReader, writer: StreamWriter) -> None:
        opened.update(connection.server_state.connections)
        assert opened == {connection}
        assert not connection.flow.write_paused
        connection.pause_writing()
        assert connection.flow.write_paused
        connection.resume_writing()
        assert not connection.flow.write_paused
        writer.write(b"0\r\n\r\n")
        await reader.readuntil(b"0\r\n\r\n")

    serve(talk)
    [connection] = opened
    assert not connection.server_state.connections, "a lost one is forgotten"


def test_a_malformed_body_after_the_beginning_of_its_answer_raises() -> None:
    async def talk(connection: Replaced, reader: StreamReader, writer: StreamWriter) -> None:
        writer.write(b"no size\r\n")
        assert await reader.read() == b""
        assert len(connection.errors) == 1

    serve(talk)


def test_signals_go_to_handle_exit() -> None:
    signals = list[int]()

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            signals.append(sig)

    with Server(uvicorn.Config(begin, log_config=None)).capture_signals():
        signal.raise_signal(signal.SIGTERM)
    assert signals == [signal.SIGTERM]
