"""Connections that keep the server waiting are closed: whoever says nothing, or never reads, holds nothing for long."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, Literal

from uvicorn.protocols.http.h11_impl import H11Protocol

from .limits import Limits

Wait = Literal["head", "send", "none"]


class Connection(H11Protocol):
    """Uvicorn's connection, which knows what it is waiting for and since when."""

    _waiting: tuple[Any, ...] = ("none",)
    _since = 0.0

    def waited(self, now: float) -> tuple[Wait, float]:
        """What of the client's this waits for, and the seconds since there was any progress.

        Must be asked regularly, because progress is what has changed since it was last asked.
        """
        waiting = self._wait()
        if waiting != self._waiting:
            self._waiting, self._since = waiting, now
        return waiting[0], now - self._since

    @property
    def between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> tuple[Any, ...]:
        """The kind of wait, and what changes with progress."""
        unsent = self.transport.get_write_buffer_size()
        if unsent and (self.between_requests or self.flow.write_paused):
            return "send", unsent
        if self.between_requests and self.timeout_keep_alive_task is None:  # else uvicorn's own time is running
            return "head", id(self.cycle)
        return ("none",)  # a body's time is measured where it is read

    def _should_upgrade(self) -> bool:
        """There are no websockets here, and nothing to be said of it in the log for everyone who asks."""
        return False


def close_overdue(connections: Iterable[Connection], limits: Limits, now: float) -> None:
    """Cut off connections that make no progress, and those beyond the limit that have waited longest for a request.

    Aborted, not closed: closing would wait until what is unsent has been read.
    """
    allowed: dict[Wait, float] = {"head": limits.head_seconds, "send": limits.send_seconds, "none": inf}
    kept = []
    for connection in connections:
        wait, seconds = connection.waited(now)
        if seconds > allowed[wait]:
            connection.transport.abort()
        else:
            kept.append((seconds, connection))
    surplus = len(kept) - limits.connections
    if surplus > 0:
        idle = [each for each in kept if each[1].between_requests]
        for _, connection in sorted(idle, key=lambda each: each[0], reverse=True)[:surplus]:
            connection.transport.abort()
