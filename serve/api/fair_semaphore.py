"""A few at a time, and clients one after the other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


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
