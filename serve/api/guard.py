"""Middleware in front of all routes: request forms, and checks of key, host and framing."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Collection, Sequence
from hashlib import blake2b
from ipaddress import ip_address
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, speaks_messages

log = logging.getLogger("eagle_mlx.serve")

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]+)(?::\d+)?", re.IGNORECASE)
_ABSOLUTE = re.compile(r"https?://([^/?#]*)(/.*)?", re.IGNORECASE | re.DOTALL)
"""A request target with scheme and host, meant for proxies; servers must accept it too (RFC 9112, 3.2.2)."""
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
        client, said = scope.get("client") or ("unknown", 0), "the API key is missing or wrong"
        log.warning("refused with 401: %s; client %s", said, client[0])
        refusal = ApiError(401, said, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
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


class HostGuard:
    """Allows requests if `Host` is a loopback address, `localhost`, or an allowed name.

    A web page can point its own name at this machine (DNS rebinding). The browser then treats this server as the page's
    own, and only the name in `Host` tells them apart.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]):
        self.app, self._allowed = app, {name.lower() for name in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is None or self._knows(host):  # browsers always send a host
            await self.app(scope, receive, send)
            return
        said = f"the host {host[:100]!r} is not allowed; to allow it, start the server with --allowed-host"
        refusal = ApiError(403, said, code="host_not_allowed")
        await refusal.response(scope["path"], {})(scope, receive, send)

    def _knows(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        name = found[1].strip("[]").lower().rstrip(".") if found else ""
        return name == "localhost" or name in self._allowed or is_loopback(name)


def is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


class RequestForms:
    """Normalizes requests for the other layers, and adds an id and the ignored fields to each response.

    An absolute target becomes a path, and its host replaces `Host`. HEAD is handled as GET, without the body. The id is
    in the header of the client's API. Requests with both a length and a transfer coding are refused, because a proxy
    may read them as two (RFC 9112, 6.1).
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_head = scope["method"] == "HEAD"
        asked = {**scope, **_relative(scope), "method": "GET" if is_head else scope["method"]}
        headers = Headers(scope=asked)
        name = b"request-id" if speaks_messages(asked["path"], headers) else b"x-request-id"
        id = (name, f"req_{secrets.token_hex(12)}".encode())

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [id]
                if ignored := asked.get("state", {}).get("ignored_fields"):
                    more.append((b"x-ignored-fields", ignored.encode()))
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            elif message["type"] == "http.response.body" and is_head:
                message = {**message, "body": b""}
            await send(message)

        if "content-length" not in headers or "transfer-encoding" not in headers:
            await self.app(asked, receive, answer)
            return
        said = "the request has both Content-Length and Transfer-Encoding; send one of them"
        refusal = ApiError(400, said, headers={"Connection": "close"})
        await refusal.response(asked["path"], {})(asked, receive, answer)


def _relative(scope: Scope) -> dict[str, Any]:
    """Return the scope fields that an absolute target changes; empty if the target is a path."""
    found = _ABSOLUTE.fullmatch(scope["path"])
    if found is None:
        return {}
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    return {"path": found[2] or "/", "headers": [(b"host", found[1].encode("latin-1", "replace")), *headers]}
