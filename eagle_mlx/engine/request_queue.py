"""The requests that wait, and whose turn is next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from eagle_mlx.request_state import RequestState

MOST_SKIPS = 8
"""Shorter prompts that may pass a client's oldest request: as many as the default batch has requests."""
_REMEMBERED = 1024
"""Clients whose last turns are remembered: as many as may be connected to a server (`Limits.connections`)."""


@dataclass
class _Client:
    """The requests of one client, by the chunks that their prompts take, each list in the order in which they came."""

    lines: dict[int, deque[tuple[int, RequestState]]] = field(default_factory=dict)
    """With the number of each request, which counts up. No list is empty."""
    skips: int = 0
    """How often the oldest has been passed."""
    passed: int = 0
    """Clients that came later and went before it, since its last turn."""

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
        """How many of the same client go before one; None where it does not wait. Any thread may ask."""
        copy = _Client({chunks: deque(line) for chunks, line in list(self.lines.items()) if line}, self.skips)
        for place in range(len(copy)):
            chunks = copy.following
            if (first := copy.lines[chunks][0][1]) is request:
                return place
            copy.take(chunks, first)
        return None


class RequestQueue:
    """Lets clients take turns, so that one with many requests does not keep the others waiting.

    Of one client, prompts that are read in fewer chunks go first, and those of as many in the order in which they came.
    Its oldest request is passed at most `MOST_SKIPS` times, so that long prompts have their turn too.

    Who comes goes before clients that have had a turn since its own last one: at most `MOST_SKIPS` do so before each.

    Clients that hold fewer rows go first. Of one client, its paused requests go before all others.
    """

    def __init__(self, chunk: int, held: Callable[[], Mapping[str, int]] = dict):
        """`chunk`: positions of a prompt that are read in one step. `held`: returns the rows that each client holds;
        any thread may call it."""
        self._chunk, self._held = chunk, held
        self.clients: dict[str, _Client] = {}
        """Those of which requests wait, by name. The one whose turn it is comes first."""
        self._numbers = count()
        self._last_turns: dict[str, int] = {}
        """The numbers of the last turns of clients, the longest ago first."""

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
        """The next one. The queue must not be empty."""
        client = self._in_turn()[0][1]
        return client.lines[client.following][0][1]

    def first(self, fits: Callable[[RequestState], bool]) -> RequestState | None:
        """The next one for which this is true: clients in turn, of each the one that is next, then short before long.

        Of a client's prompts that are read in as many chunks only the one that came first is asked about.
        """
        for _, client in self._in_turn():
            for chunks in (client.following, *sorted(client.lines)):
                if fits(request := client.lines[chunks][0][1]):
                    return request
        return None

    def pop(self) -> RequestState:
        """Take the next one; its client's next turn comes behind everybody else's."""
        request = self.peek()
        self.take(request)
        return request

    def take(self, request: RequestState) -> None:
        """The same with one that `peek` or `first` gave."""
        client = self.clients.pop(request.client)
        client.take(self.chunks(request), request)
        if client.lines:
            self.clients[request.client] = client
        self._last_turns.pop(request.client, None)
        self._last_turns[request.client] = next(self._numbers)
        if len(self._last_turns) > _REMEMBERED:
            del self._last_turns[next(iter(self._last_turns))]

    def remove(self, request: RequestState) -> None:
        """Let a request go that waits. Raises KeyError or StopIteration where it does not."""
        client = self.clients[request.client]
        if client.lines[client.oldest][0][1] is request:
            client.skips = 0
        client.remove(self.chunks(request), request)
        if not client.lines:
            del self.clients[request.client]

    def before(self, request: RequestState) -> int | None:
        """How many go before a request if nobody comes and all fit; None where it does not wait.

        Any thread may ask: what it is told then is about right.
        """
        clients = self._in_turn()  # copied in one piece, as is all that is looked at here
        at = next((at for at, (name, _) in enumerate(clients) if name == request.client), None)
        own = clients[at][1].before(request) if at is not None else None
        if at is None or own is None:
            return None
        lengths = [len(client) for _, client in clients]
        return own + sum(min(length, own + (other < at)) for other, length in enumerate(lengths) if other != at)

    def _in_turn(self) -> list[tuple[str, _Client]]:
        """The clients, the one whose turn it is first."""
        held = self._held()
        return sorted(self.clients.items(), key=lambda named: held.get(named[0], 0))

    def clear(self) -> None:
        self.clients.clear()

    def _enter(self, name: str) -> None:
        """Give a client its place, of which nobody waits."""
        clients = list(self.clients.items())
        last = self._last_turns.get(name, -1)
        at = len(clients)
        while at and clients[at - 1][1].passed < MOST_SKIPS and self._last_turns.get(clients[at - 1][0], -1) > last:
            at -= 1
            clients[at][1].passed += 1
        self.clients = dict([*clients[:at], (name, _Client()), *clients[at:]])

    def chunks(self, request: RequestState) -> int:
        """Return the steps that its prompt is read in, without the last token, which the first round reads.

        0 for a paused request: most of its text is in the prefix cache, and it has waited before.
        """
        return 0 if request.paused else max(1, -(-(len(request.prompt) - 1) // self._chunk))
