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
    if (coding := request.headers.get("content-encoding", "").lower()) not in ("", "identity"):
        raise ApiError(400, f"the body is compressed ({coding[:20]}); send it without Content-Encoding")
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


class Pool:
    """Threads for one kind of work. They serve clients in turn, because each client has at most `per_client` of them.

    Canceling a request drops work that has not started; other work keeps its client's turn until it ends.
    """

    def __init__(self, name: str, threads: int, per_client: int):
        self._threads, self._per_client = ThreadPoolExecutor(threads, name), per_client
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, work: Callable[[], T], client: str) -> T:
        """Run work in a thread when it is its client's turn. Raises what `work` raises."""
        turn = self._turns.setdefault(client, asyncio.Semaphore(self._per_client))
        await turn.acquire()
        loop, running = asyncio.get_running_loop(), self._threads.submit(work)

        def release(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(turn.release)

        running.add_done_callback(release)  # not at the end of this task: canceling it does not end the thread's work
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Pools:
    """A pool for each kind of work, so that short requests never wait for long ones or for schemas."""

    def __init__(self, limits: Limits):
        self._parsing, self._long = Pool("parse", 1, 1), Pool("long", limits.threads, 1)
        self._short, self._schemas = (Pool(kind, limits.threads, limits.threads) for kind in ("short", "schema"))

    async def parse(self, work: Callable[[], T], client: str) -> T:
        """Run work over a client's long body. Raises what `work` raises."""

        def run() -> T:
            gc.disable()  # collections would take longer than the work, and hold the interpreter lock
            try:
                return work()
            finally:
                gc.enable()

        return await self._parsing.run(run, client)

    async def encode(self, work: Callable[[], T], client: str, is_long: bool, has_schema: bool) -> T:
        """Run work that renders and encodes a prompt. Raises what `work` raises."""
        pool = self._long if is_long else self._schemas if has_schema else self._short
        return await pool.run(work, client)

    def close(self) -> None:
        for pool in (self._short, self._parsing, self._long, self._schemas):
            pool.close()
