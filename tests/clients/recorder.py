"""A proxy that records a program's requests to a server, and the answers."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

PIECE = 1 << 16
HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host"}
"""Headers that belong to one connection."""


@dataclass
class Exchange:
    """A request and its answer."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int = 0
    answer: str = ""

    def __str__(self) -> str:
        return f"{self.method} {self.path} -> {self.status}"


@dataclass
class Recorder:
    """The proxy's address, and the recorded exchanges."""

    address: str
    exchanges: list[Exchange] = field(default_factory=list)


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore programs that disconnect before the answer; their requests are recorded."""


@contextmanager
def recording(server: str) -> Iterator[Recorder]:
    """Run a proxy for the server at this address, such as http://127.0.0.1:8000."""
    host = urlsplit(server).netloc
    recorder = Recorder("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            exchange = Exchange(self.command, self.path, dict(self.headers), _read(body))
            recorder.exchanges.append(exchange)
            connection = http.client.HTTPConnection(host)
            kept = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
            connection.request(self.command, self.path, body or None, kept)
            answer = connection.getresponse()
            exchange.status = answer.status
            try:
                exchange.answer = self._give(answer).decode(errors="replace")
            except ConnectionError:  # the program has disconnected
                self.close_connection = True
            finally:
                connection.close()

        def _give(self, answer: http.client.HTTPResponse) -> bytes:
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in HOP:
                    self.send_header(name, value)
            chunked = answer.getheader("content-length") is None and self.command != "HEAD"
            if chunked:
                self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            given = bytearray()
            while piece := answer.read1(PIECE):
                given += piece
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
                self.wfile.flush()
            if chunked:
                self.wfile.write(b"0\r\n\r\n")
            return bytes(given)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing, because exchanges are recorded."""

        do_GET = do_POST = do_HEAD = do_DELETE = do_OPTIONS = do_PUT = _pass_on

    proxy = _Proxy(("127.0.0.1", 0), Handler)
    recorder.address = f"http://127.0.0.1:{proxy.server_port}"
    thread = Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield recorder
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()


def _read(body: bytes) -> Any:
    """Parse a body as JSON if possible."""
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
