"""The queue of waiting requests, in which clients take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from eagle_mlx.request_state import RequestState

MOST_SKIPS = 8
"""Maximum shorter prompts that may pass a client's oldest request: the default batch size."""
_REMEMBERED = 1024
"""Maximum number of remembered clients: as many as a server's connections (`Limits.connections`)."""


@dataclass
class _Client:
    """The waiting requests of one client, by number of prefill chunks, each list in order of arrival."""

    lines: dict[int, deque[tuple[int, RequestState]]] = field(default_factory=dict)
    """Requests with ascending numbers. No list is empty."""
    skips: int = 0
    """How often other requests passed the oldest one."""
    passed: int = 0
    """Clients that arrived later and passed this one since its last turn."""

    @property
    def oldest(self) -> int:
        return min(self.lines, key=lambda chunks: self.lines[chunks][0][0])

    @property
    def following(self) -> int:
        return self.oldest if self.skips >= MOST_SKIPS else min(self.lines)

    def __len__(self) -> int:
        return sum(map(len, list(self.lines.values())))

    def take(self, chunks: int, request: RequestState) -> None:
        self.skips, self.passed = 0 if chunks == self.oldest else self.skips + 1, 0
        self.remove(chunks, request)

    def remove(self, chunks: int, request: RequestState) -> None:
        line = self.lines[chunks]
        del line[next(index for index, (_, each) in enumerate(line) if each is request)]
        if not line:
            del self.lines[chunks]

    def before(self, request: RequestState) -> int | None:
        """Return how many requests of this client are ahead of one; None if it does not wait. Thread-safe."""
        copy = _Client({chunks: deque(line) for chunks, line in list(self.lines.items()) if line}, self.skips)
        for place in range(len(copy)):
            chunks = copy.following
            if (first := copy.lines[chunks][0][1]) is request:
                return place
            copy.take(chunks, first)
        return None


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
        return sum(map(len, self.clients.values()))

    def __iter__(self) -> Iterator[RequestState]:
        lists = (waiting for client in self.clients.values() for waiting in client.lines.values())
        return (request for waiting in lists for _, request in waiting)

    def append(self, request: RequestState) -> None:
        if request.client not in self.clients:
            self._enter(request.client)
        line = self.clients[request.client].lines.setdefault(self.chunks(request), deque())
        number = next(self._numbers)
        if request.paused:
            line.appendleft((-number, request))  # the newest is paused first, and resumed last
        else:
            line.append((number, request))

    def peek(self) -> RequestState:
        """Return the next request. The queue must not be empty."""
        client = self._in_turn()[0][1]
        return client.lines[client.following][0][1]

    def first(self, fits: Callable[[RequestState], bool]) -> RequestState | None:
        """Return the first request that fits: clients in turn, for each its next request, then short before long.

        Of a client's prompts with the same number of chunks, only the oldest is checked.
        """
        for _, client in self._in_turn():
            for chunks in (client.following, *sorted(client.lines)):
                if fits(request := client.lines[chunks][0][1]):
                    return request
        return None

    def pop(self) -> RequestState:
        """Remove and return the next request. Its client goes to the end of the line."""
        request = self.peek()
        self.take(request)
        return request

    def take(self, request: RequestState) -> None:
        """Remove a request returned by `peek` or `first`. Its client goes to the end of the line."""
        client = self.clients.pop(request.client)
        client.take(self.chunks(request), request)
        if client.lines:
            self.clients[request.client] = client
        self._last_turns.pop(request.client, None)
        self._last_turns[request.client] = next(self._numbers)
        if len(self._last_turns) > _REMEMBERED:
            del self._last_turns[next(iter(self._last_turns))]

    def remove(self, request: RequestState) -> None:
        """Remove a waiting request. Raises KeyError or StopIteration if it does not wait."""
        client = self.clients[request.client]
        if client.lines[client.oldest][0][1] is request:
            client.skips = 0
        client.remove(self.chunks(request), request)
        if not client.lines:
            del self.clients[request.client]

    def before(self, request: RequestState) -> int | None:
        """Return how many requests are ahead of one if no others come and all fit; None if it does not wait.

        Any thread may call this; the result is then approximate.
        """
        clients = self._in_turn()  # an atomic copy, as are the other reads here
        at = next((at for at, (name, _) in enumerate(clients) if name == request.client), None)
        own = clients[at][1].before(request) if at is not None else None
        if at is None or own is None:
            return None
        lengths = [len(client) for _, client in clients]
        return own + sum(min(length, own + (other < at)) for other, length in enumerate(lengths) if other != at)

    def _in_turn(self) -> list[tuple[str, _Client]]:
        held = self._held()
        return sorted(self.clients.items(), key=lambda named: held.get(named[0], 0))

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

    def chunks(self, request: RequestState) -> int:
        """Return the number of steps to read its prompt without the last token, which the first round reads.

        Return 0 for a paused request: most of its text is in the prefix cache, and it has already waited.
        """
        return 0 if request.paused else max(1, -(-(len(request.prompt) - 1) // self._chunk))
