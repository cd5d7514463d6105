"""The requests that wait, and whose turn is next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from eagle_mlx.request import Row

MOST_SKIPS = 8
"""Shorter prompts that may pass a client's oldest request: as many as the default batch has rows."""


@dataclass
class _Requests:
    """Those of one client, by the chunks that their prompts take, each list in the order in which they came."""

    by_chunks: dict[int, deque[tuple[int, Row]]] = field(default_factory=dict)
    """With the number of each request, which counts up."""
    skips: int = 0
    """How often the oldest has been passed."""

    @property
    def oldest(self) -> int:
        return min(self.by_chunks, key=lambda chunks: self.by_chunks[chunks][0][0])

    @property
    def following(self) -> int:
        return self.oldest if self.skips >= MOST_SKIPS else min(self.by_chunks)


class RequestQueue:
    """Lets clients take turns, so that one with many requests does not keep the others waiting.

    Of one client, prompts that are read in fewer chunks go first, and those of as many in the order in which they came.
    Its oldest request is passed at most `MOST_SKIPS` times, so that long prompts have their turn too.
    """

    def __init__(self, chunk: int):
        """`chunk`: positions of a prompt that are read in one step."""
        self._chunk = chunk
        self._clients: dict[str, _Requests] = {}
        """The one whose turn it is comes first."""
        self._numbers = count()

    def __len__(self) -> int:
        return sum(len(rows) for each in self._clients.values() for rows in each.by_chunks.values())

    def __iter__(self) -> Iterator[Row]:
        return (row for each in self._clients.values() for rows in each.by_chunks.values() for _, row in rows)

    def append(self, row: Row) -> None:
        requests = self._clients.setdefault(row.client, _Requests())
        requests.by_chunks.setdefault(self._chunks(row), deque()).append((next(self._numbers), row))

    def peek(self) -> Row:
        """The next one. The queue must not be empty."""
        requests = next(iter(self._clients.values()))
        return requests.by_chunks[requests.following][0][1]

    def pop(self) -> Row:
        """Take the next one; its client's next turn comes behind everybody else's."""
        row = self.peek()
        requests = self._clients.pop(row.client)
        chunks = requests.following
        requests.skips = 0 if chunks == requests.oldest else requests.skips + 1
        self._clients[row.client] = requests
        requests.by_chunks[chunks].popleft()
        self._forget_empty(row.client, chunks)
        return row

    def remove(self, row: Row) -> None:
        """Let a row go that waits. Raises KeyError or StopIteration where it does not."""
        chunks, requests = self._chunks(row), self._clients[row.client]
        rows = requests.by_chunks[chunks]
        index = next(index for index, (_, each) in enumerate(rows) if each is row)
        if index == 0 and chunks == requests.oldest:
            requests.skips = 0
        del rows[index]
        self._forget_empty(row.client, chunks)

    def clear(self) -> None:
        self._clients.clear()

    def _forget_empty(self, client: str, chunks: int) -> None:
        requests = self._clients[client]
        if not requests.by_chunks[chunks]:
            del requests.by_chunks[chunks]
        if not requests.by_chunks:
            del self._clients[client]

    def _chunks(self, row: Row) -> int:
        """Steps that its prompt is read in, without the last token, which the first round reads."""
        return max(1, -(-(len(row.prompt) - 1) // self._chunk))
