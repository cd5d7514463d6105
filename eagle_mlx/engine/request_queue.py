"""The queue of waiting requests, in which clients take turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice, takewhile, zip_longest

from eagle_mlx.request_state import RequestState

MOST_SKIPS = 8
"""How often others may pass a request that does not fit: the default batch size."""
_LOOKED_AT = 32
"""Number of waiting requests that are checked in one step, because each check takes time."""


class RequestQueue:
    """Lets clients take turns, so that a client with many requests does not block others.

    Clients with fewer rows go first, then those that have waited longest for their turn. Within a client, requests go
    in order of arrival, but paused ones go before all others.
    """

    def __init__(self, held: Callable[[], Mapping[str, int]] = dict):
        """`held`: returns the number of rows per client; must be thread-safe."""
        self._held = held
        self.lines: dict[str, list[RequestState]] = {}
        """The waiting requests of each client, in turn. It is replaced, never changed: other threads read it, and no
        interrupt may lose a request."""
        self._skips: Counter[RequestState] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self.lines.values()))

    def __iter__(self) -> Iterator[RequestState]:
        """Yield the requests in the order in which they are admitted if all fit and none arrive. Thread-safe."""
        held = self._held()
        in_turn = [line for _, line in sorted(self.lines.items(), key=lambda named: held.get(named[0], 0))]
        return (request for turn in zip_longest(*in_turn) for request in turn if request is not None)

    def append(self, request: RequestState) -> None:
        line = self.lines.get(request.client, [])
        if request.paused:  # its client has had its turn; the newest row is paused first, and resumed last
            self._replace(request.client, [request, *line], to_end=True)
        else:
            self._replace(request.client, [*line, request])

    def first(self, fits: Callable[[RequestState], bool]) -> RequestState | None:
        """Return the first request that fits, unless another has been passed too often to wait any longer."""
        for request in islice(self, _LOOKED_AT):
            if fits(request):
                return request
            if self._skips[request] >= MOST_SKIPS:
                break
        return None

    def take(self, request: RequestState, fits: Callable[[RequestState], bool]) -> None:
        """Remove a request, which passes those before it that do not fit. Its client goes to the end of the line."""
        passed = takewhile(lambda each: each is not request, self)
        self._skips.update([each for each in passed if not fits(each)])
        self.remove(request, to_end=True)

    def remove(self, request: RequestState, to_end: bool = False) -> None:
        """Remove a request if it waits. `to_end`: its client goes to the end of the line."""
        self._skips.pop(request, None)
        line = [other for other in self.lines.get(request.client, []) if other is not request]
        self._replace(request.client, line, to_end)

    def remove_ended(self) -> None:
        lines = {name: [row for row in line if row.finish_reason is None] for name, line in self.lines.items()}
        self.lines = {name: line for name, line in lines.items() if line}
        self._skips = Counter({row: count for row, count in self._skips.items() if row.finish_reason is None})

    def _replace(self, client: str, line: list[RequestState], to_end: bool = False) -> None:
        others = {name: other for name, other in self.lines.items() if not (to_end and name == client)}
        self.lines = {name: other for name, other in {**others, client: line}.items() if other}
