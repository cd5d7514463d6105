"""Limits on requests, reading bodies within them, and fair use of threads."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar
from weakref import WeakValueDictionary

from fastapi import Request
from starlette.requests import ClientDisconnect

from .errors import ApiError, client_gone
from .options import Limits

_LINGERING = 8
"""The part of an oversized body to read and drop, as a multiple of the limit: clients send before they read."""


async def read_body(request: Request, limits: Limits) -> bytes:
    """Return the body, with no more of it in memory than the limit allows. Raises ApiError 400, 408, 413 or 499."""
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
    message = f"the body is larger than {limits.body_mb:g} MB; shorten it, or raise --max-body-mb"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


_NOT_BRACKETS = bytes(set(range(256)).difference(b'"[{'))
_BRACKETS = re.compile(rb'"[^"]*"|[\[{]+')


def has_more_containers(body: bytes, most: int) -> bool:
    """Return whether a JSON text has more than `most` objects and lists, without parsing it."""
    if body.count(b"{") + body.count(b"[") <= most:
        return False
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NOT_BRACKETS)
    count = 0
    for match in _BRACKETS.finditer(bare):
        count += len(match[0]) if match[0][0] != ord('"') else 0
        if count > most:
            return True
    return False


T = TypeVar("T")


class Pools:
    """A thread pool for each kind of work, so that short requests never wait for long ones or for schemas.

    Long requests are read and encoded one at a time. Clients take turns for these and for schemas, and between pieces
    of long texts. Canceling a request drops work that has not started; other work keeps its turn until it ends.
    """

    def __init__(self, limits: Limits):
        self._short = ThreadPoolExecutor(limits.short_threads, "short")
        self._parsing, self._parse_semaphore = ThreadPoolExecutor(1, "parse"), FairSemaphore()
        self._long, self._long_semaphore = ThreadPoolExecutor(limits.connections, "long"), FairSemaphore()
        self._long_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held by each client's text that is being encoded, so that each has at most one thread."""
        self._schemas = ThreadPoolExecutor(limits.schema_threads, "schema")
        self._schema_semaphore = FairSemaphore(limits.schema_threads)

    async def parse(self, work: Callable[[], T], client: str) -> T:
        """Run work over a client's long body. Raises what `work` raises."""

        def run() -> T:
            gc.disable()  # collections would take longer than the work, and hold the interpreter lock
            try:
                return work()
            finally:
                gc.enable()

        return await self._in_turn(self._parsing, self._parse_semaphore, run, client)

    async def encode(
        self, work: Callable[[Callable[[], None]], T], is_long: bool, client: str, has_schema: bool = False
    ) -> T:
        """Run work, with a function to call between pieces of a text, where others take turns. Raises its errors."""
        loop = asyncio.get_running_loop()
        if is_long:

            def pause() -> None:
                if self._long_semaphore.waiting:
                    asyncio.run_coroutine_threadsafe(self._long_semaphore.pause(), loop).result()

            async with self._long_locks.setdefault(client, asyncio.Lock()):
                return await self._in_turn(self._long, self._long_semaphore, lambda: work(pause), client)
        if has_schema:
            return await self._in_turn(self._schemas, self._schema_semaphore, lambda: work(_go_on), client)
        return await loop.run_in_executor(self._short, work, _go_on)

    async def _in_turn(
        self, pool: ThreadPoolExecutor, semaphore: FairSemaphore, work: Callable[[], T], client: str
    ) -> T:
        await semaphore.acquire(client)
        loop, running = asyncio.get_running_loop(), pool.submit(work)

        def release(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(semaphore.release)

        running.add_done_callback(release)  # not at the end of this task: canceling it does not end the thread's work
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        for pool in (self._short, self._parsing, self._long, self._schemas):
            pool.shutdown(wait=False, cancel_futures=True)


def _go_on() -> None:
    """Do nothing between pieces: nobody waits for a short request."""


class FairSemaphore:
    """A semaphore that serves clients in turn, so that one with many waiters does not delay the others."""

    def __init__(self, at_once: int = 1) -> None:
        self._semaphore = asyncio.Semaphore(at_once)
        self.waiting = 0  # clients that wait for a turn; any thread may read it
        self._first: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held by each client's request that waits for the semaphore."""

    async def acquire(self, client: str) -> None:
        """Wait for a turn, and hold it until `release`."""
        async with self._first.setdefault(client, asyncio.Lock()):
            await self._wait()

    def release(self) -> None:
        self._semaphore.release()

    async def pause(self) -> None:
        """Let all that wait have a turn, and wait for the next one."""
        self._semaphore.release()
        await self._wait()

    async def _wait(self) -> None:
        self.waiting += 1
        try:
            await self._semaphore.acquire()
        finally:
            self.waiting -= 1
