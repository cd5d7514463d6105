"""The API key, checked before anything of a request is read."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError

OPEN = frozenset({"/", "/health", "/metrics"})
"""What needs no key: it tells nothing of what is asked or answered."""


class KeyGuard:
    """Lets requests through that carry `Authorization: Bearer <key>`."""

    def __init__(self, app: ASGIApp, key: str):
        self.app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._knows(scope):
            await self.app(scope, receive, send)
            return
        headers = {"WWW-Authenticate": "Bearer"}
        refusal = ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers=headers)
        await refusal.response()(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)
