"""Middleware in front of all routes: checks of key, host and framing, and headers of responses."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Sequence
from hashlib import blake2b
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import log
from .errors import ApiError, speaks_messages

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]+)(?::\d+)?", re.IGNORECASE)
OPEN = frozenset({"/", "/health", "/metrics"})
"""Paths that need no key, because they reveal nothing about requests or answers."""


class KeyGuard:
    """Requires `Authorization: Bearer <key>` or Anthropic's `x-api-key: <key>`.

    Passes the key to the routes as a hash, and whether it is the first one, which is the administrator's.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self.app, self._keys = app, list(map(_hashed, keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._admits(scope):
            await self.app(scope, receive, send)
            return
        client, message = scope.get("client") or ("unknown", 0), "the API key is missing or wrong"
        log.warning("refused with 401: %s; client %s", message, client[0])
        refusal = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        await refusal.response(scope["path"], Headers(scope=scope))(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        texts = (given if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
        key = next((name for name in map(_hashed, texts) if name in self._keys), None)
        scope.setdefault("state", {}).update(key=key, is_admin=key == self._keys[0])
        return key is not None or scope["path"] in OPEN


def _hashed(key: str) -> str:
    """Return a key's hash. Unlike comparing keys, looking up hashes takes no time that tells how much is right."""
    return blake2b(key.strip().encode(), digest_size=16).hexdigest()


class RequestGuard:
    """Checks the host and the framing of each request, and adds an id and the ignored fields to its response.

    The id is in the header of the client's API. HEAD is handled as GET; uvicorn leaves out the body. Requests with both
    a length and a transfer coding are refused, because a proxy may read them as two (RFC 9112, 6.1).
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None):
        """hosts: names that `Host` may have besides `localhost` and loopback addresses; None for any.

        A web page can point its own name at this machine (DNS rebinding). The browser then treats this server as the
        page's own, and only the name in `Host` tells them apart.
        """
        self.app, self._hosts = app, None if hosts is None else {name.lower() for name in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request = {**scope, "method": "GET" if scope["method"] == "HEAD" else scope["method"]}
        name = b"request-id" if speaks_messages(scope["path"], headers) else b"x-request-id"
        id = (name, f"req_{secrets.token_hex(12)}".encode())

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [id]
                if ignored := request.get("state", {}).get("ignored_fields"):
                    more.append((b"x-ignored-fields", ignored.encode()))
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        refusal = self._refusal(headers)
        respond = self.app if refusal is None else refusal.response(scope["path"], {})
        await respond(request, receive, answer)

    def _refusal(self, headers: Headers) -> ApiError | None:
        host = headers.get("host")
        if host is not None and not self._knows(host):  # browsers always send a host
            message = f"the host {host[:100]!r} is not allowed; to allow it, start the server with --allowed-host"
            return ApiError(403, message, code="host_not_allowed")
        if "content-length" in headers and "transfer-encoding" in headers:
            message = "the request has both Content-Length and Transfer-Encoding; send one of them"
            return ApiError(400, message, headers={"Connection": "close"})
        return None

    def _knows(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        name = match[1].strip("[]").lower().rstrip(".") if match else ""
        return self._hosts is None or name == "localhost" or name in self._hosts or is_loopback(name)


def is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False
