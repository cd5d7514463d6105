"""The API key, checked before anything of a request is read."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError
from .guard import header

OPEN = frozenset({"/", "/health", "/metrics"})
"""What needs no key: it tells nothing of what is asked or answered."""


class KeyGuard:
    """Lets requests through that carry `Authorization: Bearer <key>`."""

    def __init__(self, app: ASGIApp, key: str):
        self.app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._knows(scope):
            await self.app(scope, receive, send)
            return
        headers = {"WWW-Authenticate": "Bearer"}
        refusal = ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers=headers)
        await refusal.response()(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, given = (header(scope, b"authorization") or "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._key)
