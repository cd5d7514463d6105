"""The queue of waiting requests, in which clients take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter

from eagle_mlx.request_state import RequestState

MOST_SKIPS = 8
"""Maximum shorter prompts that may pass a client's oldest request: the default batch size."""
_REMEMBERED = 1024
"""Maximum number of remembered clients: as many as a server's connections (`Limits.connections`)."""


@dataclass
class _Client:
    """The waiting requests of one client: paused ones first, then in order of arrival."""

    waiting: list[tuple[int, RequestState]] = field(default_factory=list)
    """Each with its number of prefill chunks."""
    skips: int = 0
    """How often other requests passed the oldest one."""
    passed: int = 0
    """Clients that arrived later and passed this one since its last turn."""

    def take(self, request: RequestState) -> None:
        self.skips, self.passed = 0 if self.waiting[0][1] is request else self.skips + 1, 0
        self.remove(request)

    def remove(self, request: RequestState) -> None:
        del self.waiting[next(at for at, (_, each) in enumerate(self.waiting) if each is request)]

    def in_order(self) -> Iterator[RequestState]:
        """Yield the requests in the order in which they are served if no others arrive. Thread-safe."""
        waiting, skips, done = list(self.waiting), self.skips, set[RequestState]()
        oldest, shortest = deque(waiting), deque(sorted(waiting, key=itemgetter(0)))
        while oldest:
            _, following = (oldest if skips >= MOST_SKIPS else shortest)[0]
            yield following
            skips = 0 if following is oldest[0][1] else skips + 1
            done.add(following)
            for line in (oldest, shortest):
                while line and line[0][1] in done:
                    line.popleft()


class RequestQueue:
    """Lets clients take turns, so that a client with many requests does not block others.

    Within a client, prompts with fewer chunks go first, then older ones. At most `MOST_SKIPS` requests pass the oldest,
    so that long prompts get their turn. Paused requests go before all others.

    A new client goes ahead of clients that were served more recently, but at most `MOST_SKIPS` pass the same client.
    Clients with fewer rows go first.
    """

    def __init__(self, chunk: int, held: Callable[[], Mapping[str, int]] = dict):
        """`chunk`: prompt positions per step. `held`: returns the number of rows per client; must be thread-safe."""
        self._chunk, self._held = chunk, held
        self.clients: dict[str, _Client] = {}
        """Clients with waiting requests, by name, in turn."""
        self._numbers = count()
        self._last_turns: dict[str, int] = {}
        """The number of each client's last turn, oldest first."""

    def __len__(self) -> int:
        return sum(len(client.waiting) for client in list(self.clients.values()))

    def __iter__(self) -> Iterator[RequestState]:
        return (request for client in list(self.clients.values()) for _, request in list(client.waiting))

    def append(self, request: RequestState) -> None:
        if request.client not in self.clients:
            self._enter(request.client)
        waiting = self.clients[request.client].waiting
        if request.paused:  # the newest is paused first, and resumed last; most of its text is in the prefix cache
            waiting.insert(0, (0, request))
        else:  # the first round reads a prompt's last token
            waiting.append((max(1, -(-(len(request.prompt) - 1) // self._chunk)), request))

    def peek(self) -> RequestState:
        """Return the next request. The queue must not be empty."""
        return next(self._in_turn()[0].in_order())

    def first(self, fits: Callable[[RequestState], bool]) -> RequestState | None:
        """Return the first request that fits: clients in turn, for each its next request, then short before long.

        Of a client's prompts with the same number of chunks, only the oldest is checked.
        """
        for client in self._in_turn():
            oldest = dict(reversed(client.waiting))
            for request in (next(client.in_order()), *(oldest[chunks] for chunks in sorted(oldest))):
                if fits(request):
                    return request
        return None

    def take(self, request: RequestState) -> None:
        """Remove a request returned by `peek` or `first`. Its client goes to the end of the line."""
        client = self.clients.pop(request.client)
        client.take(request)
        if client.waiting:
            self.clients[request.client] = client
        self._last_turns.pop(request.client, None)
        self._last_turns[request.client] = next(self._numbers)
        if len(self._last_turns) > _REMEMBERED:
            del self._last_turns[next(iter(self._last_turns))]

    def remove(self, request: RequestState) -> None:
        """Remove a waiting request. Raises KeyError or StopIteration if it does not wait."""
        client = self.clients[request.client]
        if client.waiting[0][1] is request:
            client.skips = 0
        client.remove(request)
        if not client.waiting:
            del self.clients[request.client]

    def before(self, request: RequestState) -> int | None:
        """Return how many requests are ahead of one if no others come and all fit; None if it does not wait.

        Any thread may call this; the result is then approximate.
        """
        clients = self._in_turn()  # a copy
        for at, client in enumerate(clients):
            for own, each in enumerate(client.in_order()):
                if each is request:
                    lengths = [len(other.waiting) for other in clients]
                    others = (min(n, own + (other < at)) for other, n in enumerate(lengths) if other != at)
                    return own + sum(others)
        return None

    def _in_turn(self) -> list[_Client]:
        held = self._held()
        return [client for _, client in sorted(self.clients.items(), key=lambda named: held.get(named[0], 0))]

    def clear(self) -> None:
        self.clients.clear()

    def _enter(self, name: str) -> None:
        """Add a client that has no waiting requests yet."""
        clients = list(self.clients.items())
        last = self._last_turns.get(name, -1)
        at = len(clients)
        while at and clients[at - 1][1].passed < MOST_SKIPS and self._last_turns.get(clients[at - 1][0], -1) > last:
            at -= 1
            clients[at][1].passed += 1
        self.clients = dict([*clients[:at], (name, _Client()), *clients[at:]])
