"""What goes wrong with a request, the shape in which clients of each API hear of it, and what routes publish."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from types import UnionType
from typing import Any, Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict
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


ERRORS = (400, 401, 404, 413, 429, 500, 503, 504)
"""How a POST may end."""
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
EVENTS: dict[str, Any] = {"content": {"text/event-stream": {"schema": _EVENT}}}
"""What an answer may be instead."""


class Shape(BaseModel):
    """Something that clients get. Fields with a default may be left out."""

    model_config = ConfigDict(extra="forbid")

    def plain(self) -> dict[str, Any]:
        """Return the fields that were given."""
        return self.model_dump(exclude_unset=True)


class ErrorBody(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Shape):
    error: ErrorBody


class MessagesErrorBody(Shape):
    type: str
    message: str


class MessagesError(Shape):
    type: Literal["error"]
    error: MessagesErrorBody


def documented(
    answer: type[Shape] | UnionType, *errors: int, error: type[Shape] = Error, **more: Any
) -> dict[int | str, dict[str, Any]]:
    """Return a route's `responses`: its answer, and the errors that it may end in."""
    return {200: {"model": answer, **more}, **{status: {"model": error} for status in errors}}


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
        kind = _TYPES.get(self.status, "invalid_request_error")
        return Error(error=ErrorBody(message=self.message, type=kind, param=self.param, code=self.code)).plain()

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
        return MessagesError(type="error", error=MessagesErrorBody(type=kind, message=message)).plain()


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
