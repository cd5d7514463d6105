"""An HTTP request whose body was read: its client, its validated fields, and threads to work on it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from threading import Event
from typing import Generic, TypeVar

from fastapi import Request

from eagle_mlx import EagleError

from .. import log_once
from .encoding import Encoder
from .errors import ApiError, bad_request, client_gone, shortened
from .limits import has_more_containers, read_body
from .model import Loaded, check
from .models import Models
from .schema import ChoicesRequest
from .service import Service
from .validation import B, read

T = TypeVar("T")
C = TypeVar("C", bound=ChoicesRequest)
_UNUSUAL = re.compile(r"[^\w.\[\]-]", re.ASCII)
"""Characters of field names that a header or a log line may not take as they are."""
_MOST_NAMED = 20
"""Ignored fields to name per request: a header has room for them."""
Owner = tuple[str, str]
"""A client, and the namespace of its prefix cache."""


def models_of(request: Request) -> Models:
    models: Models = request.app.state.models
    return models


def client_of(request: Request) -> str:
    """Return the client's address for fair scheduling; clients may share a key."""
    return request.client.host if request.client is not None else ""


def key_of(request: Request) -> str | None:
    """Return the hash of the request's API key; None if it has none."""
    key: str | None = getattr(request.state, "key", None)
    return key


@dataclass(frozen=True)
class Received(Generic[B]):
    """A request whose body was read and validated."""

    http: Request
    body: B
    size: int
    """Bytes to read and encode: the body, and the stored conversation that it continues."""
    is_long: bool
    """Whether reading them would hold up the event loop."""

    @property
    def owner(self) -> Owner:
        """Its client, and a prefix cache for its key and `cache_salt`. Requests without either share one."""
        key, salt = key_of(self.http), getattr(self.body, "cache_salt", None)
        return client_of(self.http), "" if key is None and salt is None else json.dumps([key, salt])

    async def in_turn(self, work: Callable[[], T]) -> T:
        """Run work that takes time in proportion to the size: at once if it is short, else in a thread, in turn.

        Raises what `work` raises, and ApiError 499.
        """
        return await _in_turn(self.http, self.is_long, work)

    async def in_thread(self, loaded: Loaded, work: Callable[[Encoder], T], has_schema: bool = False) -> T:
        """Run `work` in a thread, with a function that encodes texts until this is canceled.

        Library errors become ApiError 400.
        """
        cancelled = Event()

        def run(pause: Callable[[], None]) -> T:
            def check() -> None:
                pause()
                if cancelled.is_set():
                    raise client_gone()

            return work(Encoder(loaded.tokenizer, check))

        try:
            return await models_of(self.http).pools.encode(run, self.size, client_of(self.http), has_schema)
        except EagleError as e:
            raise bad_request(e) from e
        finally:
            cancelled.set()


async def receive(request: Request, kind: type[B]) -> Received[B]:
    """Read, parse and validate the body. Raises ApiError."""
    models = models_of(request)
    models.check_open()  # a server that takes no requests does not read bodies
    limits = models.settings.limits
    content = await read_body(request, limits)

    def parse() -> tuple[B, list[str]]:
        if has_more_containers(content, limits.containers):
            message = f"the body has more than {limits.containers} objects and lists; send fewer messages or tools"
            raise ApiError(413, message, code="request_too_large")
        return read(kind, content, models.settings.strict_fields)

    is_long = len(content) >= limits.long_bytes or has_more_containers(content, limits.long_containers)
    body, ignored = await _in_turn(request, is_long, parse)
    if ignored:
        names = ", ".join(_UNUSUAL.sub("?", shortened(name, 100)) for name in ignored[:_MOST_NAMED])
        request.state.ignored_fields = names  # for the header that `guard.RequestForms` adds
        log_once(f"{request.url.path}: ignored unknown fields: {names}; --strict-fields refuses them")
    return Received(request, body, len(content), is_long)


async def _in_turn(request: Request, is_long: bool, work: Callable[[], T]) -> T:
    if not is_long:
        return work()
    return await unless_disconnected(request, models_of(request).pools.parse(work, client_of(request)))


async def receive_choices(request: Request, kind: type[C]) -> tuple[Received[C], Service]:
    """Return a validated request and the service of its model. Raises ApiError."""
    received = await receive(request, kind)
    service = models_of(request).named(received.body.model)
    check(received.body, service.settings.limits)
    return received, service


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. Raises ApiError 499 if the client disconnects first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise client_gone()
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
