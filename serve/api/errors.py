"""Errors of requests, their bodies in each API, and what routes document."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

_BOTH = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
_TYPES = {**_BOTH, 500: "server_error", 501: "not_implemented_error", 503: "service_unavailable_error"}
_MESSAGES_TYPES = {**_BOTH, 413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
"""From Anthropic's documentation of errors, which uses 529 for its own overload."""
NO_THREADS = "thread_unsupported_request"  # Anthropic's client then sends whole conversations
MESSAGES, MODELS = "/v1/messages", "/v1/models"
TOO_LONG = "context_length_exceeded"  # the code of a prompt that leaves no room for an answer
SHUTTING_DOWN = "the server is shutting down"
NO_TOKEN = "the request ran out of time before its first token; send a shorter one, or try again later"
MOST_CHARACTERS = 4000  # of a message: enough for all routes and a long reason, and a bound on quoted client input

ERRORS = (400, 401, 404, 413, 429, 500, 503, 504)
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
EVENTS: dict[str, Any] = {"content": {"text/event-stream": {"schema": _EVENT}}}  # the response of a stream


def documented(*errors: int, **answer: Any) -> dict[int | str, dict[str, Any]]:
    """Return a route's `responses`: what is said of its answer, and the statuses of errors.

    Bodies are those of OpenAI's and Anthropic's APIs, whose clients declare them.
    """
    return {200: answer, **{status: {"description": HTTPStatus(status).phrase} for status in errors}}


class ApiError(Exception):
    """A refusal: status, message, the field at fault, and a code for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message = status, shortened(message, MOST_CHARACTERS)
        self.param, self.code = param, code
        self.headers = dict(headers or {})
        self.to_anthropic: str | None = None  # the message in Anthropic's API, if it differs

    def rename(self, field: str) -> None:
        """Name the field by another API's name, also in a message that begins with it."""
        if self.param is not None and self.message.startswith(self.param):
            self.message = f"{field}{self.message.removeprefix(self.param)}"
        self.param = field

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str, headers: Mapping[str, str]) -> Response:
        """Return the error in the shape of the client's API, which the path and headers determine."""
        body = self.messages_body if speaks_messages(path, headers) else self.body
        return Response(json.dumps(body), self.status, self.headers, "application/json")

    @property
    def messages_body(self) -> dict[str, Any]:
        """The body in Anthropic's shape, where only the message can name the field."""
        named = self.param is None or self.param in self.message
        message = self.message if named else f"{self.param}: {self.message}"
        kind = _MESSAGES_TYPES.get(self.status, "invalid_request_error")
        details = {"details": {"error_code": self.code}} if self.code == NO_THREADS else {}
        return {"type": "error", "error": {"type": kind, "message": self.to_anthropic or message, **details}}


def shutting_down() -> ApiError:
    return ApiError(503, SHUTTING_DOWN, code="draining", headers={"Retry-After": "30"})


def timed_out() -> ApiError:
    # A retry would only add to the load.
    return ApiError(504, NO_TOKEN, code="timeout", headers={"x-should-retry": "false"})


def client_gone() -> ApiError:
    return ApiError(499, "the client has closed the connection")


def speaks_messages(path: str, headers: Mapping[str, str]) -> bool:
    """Return whether a request uses Anthropic's API. For `/v1/models`, in both APIs, the header decides."""
    if path == MODELS or path.startswith(f"{MODELS}/"):
        return "anthropic-version" in headers
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def shortened(text: str, most: int = 100) -> str:
    """Return at most `most` characters of a text, plus "..." if it is longer."""
    return text if len(text) <= most else f"{text[:most]}..."


def add_handlers(app: FastAPI) -> None:
    """Give all errors the body of the client's API."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            reason = HTTPStatus(error.status_code).phrase.lower()
            message = f"{shortened(request.method, 20)} {shortened(request.url.path, 200)}: {reason}"
            if error.status_code == 404:
                message += f"; the paths are {', '.join(sorted(app.openapi()['paths']))}"
            error = ApiError(error.status_code, message, headers=error.headers)
        elif not isinstance(error, ApiError):
            error = ApiError(500, f"the server failed: {type(error).__name__}")
        return error.response(request.url.path, request.headers)

    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
