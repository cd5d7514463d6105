"""Threads for what is done to a request before it is decoded: reading it, and making tokens of its text."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from .limits import Limits

T = TypeVar("T")


class Pools:
    """A pool for each kind of work, so that short requests never wait for long ones, nor for schemas.

    Long ones are taken one at a time: encoding megabytes keeps a core busy for seconds, and the engine needs one too.
    A schema may take seconds to compile, in a process of its own. Clients take turns for both.
    Work that has not begun when its request is cancelled never does. Of work that has, the encoding of a long text ends
    (`encoder.py`).
    """

    def __init__(self, limits: Limits):
        self._long_bytes = limits.long_bytes
        self._reading = ThreadPoolExecutor(1, "reading")
        self._short = ThreadPoolExecutor(limits.short_threads, "short")
        self._long = ThreadPoolExecutor(1, "long")
        self._schemas = ThreadPoolExecutor(limits.schema_threads, "schema")
        self._long_semaphore, self._schema_semaphore = FairSemaphore(), FairSemaphore(limits.schema_threads)

    async def read(self, work: Callable[[], T], size: int) -> T:
        """Read a body of so many bytes; a short one at once, which takes less than to hand it over."""
        return await _in(self._reading, work) if size >= self._long_bytes else work()

    async def encode(self, work: Callable[[], T], size: int, client: str, has_schema: bool = False) -> T:
        """Make a client's request of so many bytes ready to be decoded. Raises what `work` raises."""
        if size >= self._long_bytes:
            pool, semaphore = self._long, self._long_semaphore
        elif has_schema:
            pool, semaphore = self._schemas, self._schema_semaphore
        else:
            return await _in(self._short, work)
        async with semaphore.acquire(client):
            return await _in(pool, work)

    def close(self) -> None:
        """Begin nothing more; what has begun is not waited for."""
        for pool in (self._reading, self._short, self._long, self._schemas):
            pool.shutdown(wait=False, cancel_futures=True)


class Threads(ThreadPoolExecutor):
    """A pool whose end waits for nothing: asyncio's own would keep a server from ending while some work hangs."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


async def _in(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, work)


class FairSemaphore:
    """A semaphore for which clients take turns: who has many that wait for it keeps nobody else waiting for them all.

    Belongs to the event loop.
    """

    def __init__(self, at_once: int = 1) -> None:
        self._free = at_once
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By client, the one whose turn comes next first."""

    @asynccontextmanager
    async def acquire(self, client: str) -> AsyncIterator[None]:
        """Wait for a turn, and have it for as long as this context."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(client)
        try:
            yield
        finally:
            self._release()

    async def _wait(self, client: str) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # the turn had come already
                self._release()
            raise

    def _release(self) -> None:
        """Give a turn that has ended to whoever is next, or to nobody."""
        while self._waiting:
            client = next(iter(self._waiting))
            line = self._waiting.pop(client)
            following = line.popleft()
            if line:
                self._waiting[client] = line  # behind everybody else
            if not following.done():  # else its client has left
                following.set_result(None)
                return
        self._free += 1
