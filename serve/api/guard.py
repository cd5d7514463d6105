"""Middleware that refuses requests before they are read: without the API key, to other hosts, with two lengths."""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]+)(?::\d+)?", re.IGNORECASE)
OPEN = frozenset({"/", "/health", "/metrics"})
"""What needs no key: it tells nothing of what is asked or answered."""


class KeyGuard:
    """Lets requests through that carry `Authorization: Bearer <key>`, or Anthropic's `x-api-key: <key>`."""

    def __init__(self, app: ASGIApp, key: str):
        self.app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._knows(scope):
            await self.app(scope, receive, send)
            return
        headers = {"WWW-Authenticate": "Bearer"}
        refusal = ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers=headers)
        await refusal.response(scope["path"], Headers(scope=scope))(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, given = (header(scope, b"authorization") or "").partition(" ")
        keys = [given if scheme.lower() == "bearer" else "", header(scope, b"x-api-key") or ""]
        return any(hmac.compare_digest(key.strip().encode(), self._key) for key in keys)


class HostGuard:
    """Lets requests through whose `Host` is a loopback address, `localhost`, or named.

    A web page may give its own name an address of this machine (DNS rebinding). The browser then takes this server for
    the page's own, and only the name in `Host` tells them apart.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]):
        self.app, self._allowed = app, {name.lower() for name in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = header(scope, b"host")
        if scope["type"] != "http" or host is None or self._knows(host):  # without a host it comes from no browser
            await self.app(scope, receive, send)
            return
        said = f"the host {host[:100]!r} is not served here; to let it in, name it with --allowed-host"
        await ApiError(403, said, code="host_not_allowed").response(scope["path"])(scope, receive, send)

    def _knows(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        name = found[1].strip("[]").lower().rstrip(".") if found else ""
        return name == "localhost" or name in self._allowed or is_loopback(name)


class FramingGuard:
    """Refuses a request with a length and a transfer coding, which a proxy may read as two requests (RFC 9112, 6.1)."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or None in (header(scope, b"content-length"), header(scope, b"transfer-encoding")):
            await self.app(scope, receive, send)
            return
        said = "the request has both Content-Length and Transfer-Encoding; send one of them"
        await ApiError(400, said, headers={"Connection": "close"}).response(scope["path"])(scope, receive, send)


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of a name, which must be in lower case."""
    return next((value.decode("latin-1") for key, value in scope.get("headers", ()) if key == name), None)


def is_loopback(address: str) -> bool:
    """Whether an IP address is one of this machine's own alone; False for what is no address."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False
