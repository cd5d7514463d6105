"""What goes wrong with a request, and the one shape in which clients hear of it."""

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
    503: "service_unavailable_error",
}
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
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, self.param, self.code)

    def response(self) -> Response:
        return Response(json.dumps(self.body), self.status, self.headers, "application/json")


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def bad_request(error: EagleError) -> ApiError:
    """What the library refuses is the client's to fix. Its messages begin with the field that they are about."""
    found = _FIELD.match(str(error))
    return ApiError(400, str(error), found[1] if found else None)


def add_handlers(app: FastAPI) -> None:
    """Give every error of the app the same body."""

    async def api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {HTTPStatus(error.status_code).phrase.lower()}"
        if error.status_code == 404:
            message += f"; there are {', '.join(sorted(app.openapi()['paths']))}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def unexpected(_: Request, error: Exception) -> Response:
        return ApiError(500, f"the server failed: {type(error).__name__}").response()

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)
