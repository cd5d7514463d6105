"""The engine requests of one HTTP request, and what the engine reports about them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from eagle_mlx.request import Output, TokenLogprob
from eagle_mlx.request_state import RequestState


@dataclass(frozen=True)
class RequestEvent:
    """What a step added to a request."""

    index: int
    tokens: list[int]
    logprobs: list[TokenLogprob]
    """One per token, if requested."""
    output: Output | None
    """The complete output once the request has ended."""


@dataclass(eq=False)
class Job:
    """The engine requests of one HTTP request, and their events. Belongs to the event loop."""

    deadline: float
    """When they must have ended, by the worker's clock."""
    unfinished: int
    """Requests that have not ended, including those not created yet."""
    requests: Sequence[RequestState] = ()
    answer_seconds: float = inf
    """Limit of each, from its first token to its end."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    _events: asyncio.Queue[RequestEvent] = field(default_factory=asyncio.Queue)
    _ended: set[int] = field(default_factory=set)

    def report(self, event: RequestEvent) -> None:
        if event.index in self._ended:
            return
        if event.output is not None:
            self._ended.add(event.index)
            self.unfinished -= 1
        self.begun.set()
        self._events.put_nowait(event)

    def fail(self, reason: str) -> None:
        """End its requests with an error, except those that have ended."""
        for index, request in enumerate(self.requests):
            if index not in self._ended:
                request.fail(reason)
                self.report(RequestEvent(index, [], [], request.output(None)))

    async def events(self) -> list[RequestEvent]:
        """Return all pending events, at least one; a slow reader gets more at a time."""
        found = [await self._events.get()]
        while not self._events.empty():
            found.append(self._events.get_nowait())
        return found
