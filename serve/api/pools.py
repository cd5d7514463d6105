"""Threads for what is done to a request before it is decoded: reading it, and making tokens of its text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .fair_semaphore import FairSemaphore
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
