"""What goes wrong with a request, and the shape in which clients of each API hear of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from eagle_mlx.errors import EagleError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""As Anthropic's documentation of errors has them; it says 529 for its own overload."""
MESSAGES, MODELS = "/v1/messages", "/v1/models"
MOST_SAID = 4000
"""Characters of a message: room for all routes and a long reason, whatever a client sends to be named in it."""
_NAMED = 200
"""Characters of an unknown path that its refusal repeats."""
_FIELD = re.compile(r"([a-z_]+(?:[\[.][\w\[\].]*)?)(?::| must| names| has| cannot)")
"""A field, perhaps with a place in it, at the beginning of a message."""


class ApiError(Exception):
    """A refusal: status, message, the field that it is about, a code for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        message = shortened(message, MOST_SAID)
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, self.param, self.code)

    def response(self, path: str, headers: Mapping[str, str] | None = None) -> Response:
        """The refusal of a request to this path with these headers, in the shape of the client's API."""
        body = self.messages_body if speaks_messages(path, headers or {}) else self.body
        return Response(json.dumps(body), self.status, self.headers, "application/json")

    @property
    def messages_body(self) -> dict[str, Any]:
        """As Anthropic's API has it: there the message alone names the field."""
        named = self.param is None or self.param in self.message
        message = self.message if named else f"{self.param}: {self.message}"
        kind = _MESSAGES_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


class ContextExceeded(ApiError):
    """A prompt that does not fit the context: both in tokens."""

    def __init__(self, message: str, param: str, prompt: int, context: int):
        super().__init__(400, message, param, "context_length_exceeded")
        self.prompt, self.context = prompt, context


def speaks_messages(path: str, headers: Mapping[str, str]) -> bool:
    """Whether a request is one of Anthropic's API. `/v1/models` belongs to both; there the client's header decides."""
    if path == MODELS or path.startswith(f"{MODELS}/"):
        return "anthropic-version" in headers
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def shortened(text: str, most: int) -> str:
    """The text if it is short, else so many characters of it and three points."""
    return text if len(text) <= most else f"{text[:most]}..."


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def bad_request(error: EagleError) -> ApiError:
    """What the library refuses is the client's to fix. Its messages begin with the field that they are about."""
    found = _FIELD.match(str(error))
    return ApiError(400, str(error), found[1] if found else None)


def add_handlers(app: FastAPI) -> None:
    """Give every error of an API the same body."""

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response(request.url.path, request.headers)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = shortened(request.url.path, _NAMED)
        message = f"{shortened(request.method, 20)} {path}: {HTTPStatus(error.status_code).phrase.lower()}"
        if error.status_code == 404:
            message += f"; there are {', '.join(sorted(app.openapi()['paths']))}"
        return ApiError(error.status_code, message, headers=error.headers).response(request.url.path, request.headers)

    async def unexpected(request: Request, error: Exception) -> Response:
        return ApiError(500, f"the server failed: {type(error).__name__}").response(request.url.path, request.headers)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)
