"""Middleware for forms of HTTP that routes need not know: HEAD, absolute request targets, and ids of requests."""

from __future__ import annotations

import re
import secrets
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import speaks_messages

_ABSOLUTE = re.compile(r"https?://([^/?#]*)(/.*)?", re.IGNORECASE | re.DOTALL)
"""A target with scheme and host: clients send it to a proxy, and a server must take it too (RFC 9112, 3.2.2)."""


class RequestForms:
    """Brings a request into the form that the other layers read, and gives its answer an id.

    An absolute target becomes a path, and its host replaces `Host`. HEAD becomes GET, whose body is not sent. The id
    is in the header that the client's API has for it.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        asked = {**scope, **_relative(scope)}
        is_head = scope["method"] == "HEAD"
        if is_head:
            asked["method"] = "GET"
        is_anthropic = speaks_messages(asked["path"], Headers(scope=asked))
        name = b"request-id" if is_anthropic else b"x-request-id"
        id = (name, f"req_{secrets.token_hex(12)}".encode())

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), id]}
            elif message["type"] == "http.response.body" and is_head:
                message = {**message, "body": b""}
            await send(message)

        await self.app(asked, receive, answer)


def _relative(scope: Scope) -> dict[str, Any]:
    """What an absolute target changes in a scope; nothing if the target is a path."""
    found = _ABSOLUTE.fullmatch(scope["path"])
    if found is None:
        return {}
    path = found[2] or "/"
    raw = _ABSOLUTE.fullmatch(scope.get("raw_path", b"").decode("latin-1"))
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    return {
        "path": path,
        "raw_path": ((raw[2] if raw else None) or "/").encode("latin-1"),
        "headers": [(b"host", found[1].encode("latin-1", "replace")), *headers],
    }
