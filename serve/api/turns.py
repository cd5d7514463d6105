"""One at a time, and clients one after the other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """A lock for which clients take turns: who has many that wait for it keeps nobody else waiting for them all.

    Belongs to the event loop.
    """

    def __init__(self) -> None:
        self._taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By client, the one whose turn comes next first."""

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for a turn, and have it for as long as this context."""
        if self._taken:
            await self._wait(client)
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, client: str) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # the turn had come already
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        self._taken = False
        while self._waiting:
            client = next(iter(self._waiting))
            line = self._waiting.pop(client)
            following = line.popleft()
            if line:
                self._waiting[client] = line  # behind everybody else
            if not following.done():  # else its client has left
                self._taken = True
                following.set_result(None)
                return
