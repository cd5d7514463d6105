"""How much one client may ask for, and the reading of bodies that keeps to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from fastapi import Request
from starlette.requests import ClientDisconnect

from eagle_mlx.errors import ConfigError

from .errors import ApiError

_LINGERING = 8
"""Times the limit of a body that is too large that are read and dropped: while clients send, they do not listen."""


@dataclass(frozen=True)
class Limits:
    """Bounds of a request. Raises ConfigError for one that would let nothing in."""

    body_bytes: int = 8 << 20
    queue: int = 128
    """Requests of the engine that may wait beside those that decode."""
    n: int = 16
    prompts: int = 64
    """Prompts of one completions request."""
    stops: int = 16
    stop_length: int = 256
    """Characters of a stop string."""
    long_bytes: int = 1 << 16
    """Requests of so many bytes are long: they wait for each other, and nobody else waits for them."""
    short_threads: int = 4
    """Others that are encoded at once."""
    schema_threads: int = 4
    """Requests with a schema that are made ready at once; each may keep a core busy while it is compiled."""
    responses: int = 1000
    """Responses that are kept to be gone on from."""
    response_bytes: int = 64 << 20
    """Of them together, as JSON: eight bodies of the most that one may have."""
    connections: int = 1000
    """Open at once. mlx-lm allows the process 2048 files at least; half of them are for the rest."""
    head_seconds: float = 60.0
    """For the head of a request to come; as nginx's client_header_timeout."""
    body_seconds: float = 60.0
    """For its body to come, all of it."""
    request_seconds: float = inf
    """For a request, from its arrival to its last token."""
    send_seconds: float = 60.0
    """That a client may let pass without reading anything of its answer; as nginx's send_timeout."""
    room_seconds: float = 60.0
    """For other models to become idle, so that one can be loaded; as nginx's proxy_read_timeout."""

    def __post_init__(self) -> None:
        if self.body_bytes < 1024:
            raise ConfigError(f"--max-body-mb leaves {self.body_bytes} bytes for a body; give at least 0.001")
        if self.queue < 0:
            raise ConfigError(f"--max-queue must be at least 0; got {self.queue}")
        if not self.request_seconds > 0:
            raise ConfigError(f"--request-seconds must be above 0; got {self.request_seconds}")

    def check_stops(self, stops: Sequence[str]) -> None:
        if len(stops) > self.stops:
            raise ApiError(400, f"stop has {len(stops)} strings; give at most {self.stops}", "stop")
        if any(len(text) > self.stop_length for text in stops):
            raise ApiError(400, f"a stop string is longer than {self.stop_length} characters", "stop")

    def check_n(self, n: int) -> None:
        if n > self.n:
            raise ApiError(400, f"n is {n}; ask for at most {self.n} answers", "n")

    def check_prompts(self, count: int) -> None:
        if not count:
            raise ApiError(400, "prompt is an empty list; give at least one prompt", "prompt")
        if count > self.prompts:
            raise ApiError(400, f"{count} prompts in one request; send at most {self.prompts}", "prompt")


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body, no more of it in memory than is allowed, whatever its headers say.

    Raises ApiError 400, 408 where it does not come in time, 413, or 499 where the client leaves.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # which no web page of another origin can send without being let
        raise ApiError(400, f"the body must be sent with content-type application/json, not {kind or 'none'}")
    declared = request.headers.get("content-length", "")
    if request.headers.get("expect") and declared.isdecimal() and int(declared[:20]) > limits.body_bytes:
        raise _too_large(limits)  # the client waits for leave to send it
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limits.body_bytes:
                    body += chunk
                elif size > _LINGERING * limits.body_bytes:
                    break
    except TimeoutError as e:
        message = f"the body did not come within {limits.body_seconds:g} seconds"
        raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from e
    except ClientDisconnect as e:
        raise ApiError(499, "the client has closed the connection") from e
    if size > limits.body_bytes:
        raise _too_large(limits)
    return bytes(body)


def _too_large(limits: Limits) -> ApiError:
    # What may be left of the body is not read, so the connection cannot serve another request.
    message = f"the body is larger than {limits.body_bytes} bytes; shorten it"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
