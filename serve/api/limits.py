"""Limits on requests, reading bodies within them, and fair use of threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar
from weakref import WeakValueDictionary

from fastapi import Request
from starlette.requests import ClientDisconnect

from .errors import ApiError, client_gone
from .options import Limits

_LINGERING = 8
"""How much of an oversized body to read and drop, as a multiple of the limit: clients send before they read."""


async def read_body(request: Request, limits: Limits) -> bytes:
    """Return the body, with no more of it in memory than the limit allows, whatever its headers say.

    Raises ApiError 400, 408 if it does not arrive in time, 413 if it is too large, or 499 if the client disconnects.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # web pages of other origins cannot send this type without permission
        raise ApiError(400, f"the body must be sent with content-type application/json, not {kind or 'none'}")
    declared = request.headers.get("content-length", "")
    if request.headers.get("expect") and declared.isdecimal() and int(declared[:20]) > limits.body_bytes:
        raise _too_large(limits)  # the client waits for permission to send it
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
        message = f"the body did not arrive within {limits.body_seconds:g} seconds"
        raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from e
    except ClientDisconnect as e:
        raise client_gone() from e
    if size > limits.body_bytes:
        raise _too_large(limits)
    return bytes(body)


def _too_large(limits: Limits) -> ApiError:
    # The rest of the body may be unread, so the connection cannot serve another request.
    message = f"the body is larger than {limits.body_bytes} bytes; shorten it"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


T = TypeVar("T")


class Pools:
    """A thread pool for each kind of work, so that short requests never wait for long ones or for schemas.

    Long requests are encoded one at a time, because encoding megabytes keeps a core busy for seconds. Schemas may take
    seconds to compile, in a separate process. Clients take turns for both. Canceling a request drops work that has
    not started.
    """

    def __init__(self, limits: Limits):
        self._long_bytes = limits.long_bytes
        self._short = ThreadPoolExecutor(limits.short_threads, "short")
        self._long = ThreadPoolExecutor(1, "long")
        self._schemas = ThreadPoolExecutor(limits.schema_threads, "schema")
        self._long_semaphore, self._schema_semaphore = FairSemaphore(), FairSemaphore(limits.schema_threads)

    async def encode(self, work: Callable[[], T], size: int, client: str, has_schema: bool = False) -> T:
        """Prepare a client's request of `size` bytes for decoding. Raises what `work` raises."""
        if size >= self._long_bytes:
            pool, semaphore = self._long, self._long_semaphore
        elif has_schema:
            pool, semaphore = self._schemas, self._schema_semaphore
        else:
            return await asyncio.get_running_loop().run_in_executor(self._short, work)
        async with semaphore.acquire(client):
            return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        """Start no more work, and do not wait for running work."""
        for pool in (self._short, self._long, self._schemas):
            pool.shutdown(wait=False, cancel_futures=True)


class FairSemaphore:
    """A semaphore that serves clients in turn, so that one with many waiters does not delay the others.

    Each client waits with only one of its requests at a time. Belongs to the event loop.
    """

    def __init__(self, at_once: int = 1) -> None:
        self._semaphore = asyncio.Semaphore(at_once)
        self._first: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held by each client's request that waits for the semaphore."""

    @asynccontextmanager
    async def acquire(self, client: str) -> AsyncIterator[None]:
        """Wait for a turn and hold it inside the context."""
        async with self._first.setdefault(client, asyncio.Lock()):
            await self._semaphore.acquire()
        try:
            yield
        finally:
            self._semaphore.release()
