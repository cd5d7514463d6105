"""How requests come to decode: who waits, whose prompt is being read, and when their rows can join."""

from __future__ import annotations

from eagle_mlx.cache import may_pad
from eagle_mlx.engine.batch import Batch
from eagle_mlx.engine.prefix import Prefix, PrefixCache
from eagle_mlx.engine.request_queue import RequestQueue
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.request import Request
from eagle_mlx.target import Target


class Admission:
    """Reads the prompts of those whose turn it is, a chunk at a time, so that nobody waits long for a long prompt.

    Prompts that fit into one chunk are read side by side; a longer one, or one whose beginning is in the prefix cache,
    is read alone.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        chunk: int,
        prefixes: PrefixCache | None = None,
        kv_bits: int | None = None,
    ):
        self.target, self.proposer, self.chunk, self.prefixes = target, proposer, chunk, prefixes
        self.kv_bits = kv_bits
        self.waiting = RequestQueue(chunk)
        self._may_pad = may_pad(target.model)
        self.requests: list[Request] = []
        """Those whose prompts are being read, from when they stop waiting until `joined`."""
        self._reading: Batch | None = None

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.requests

    def wants_in(self, room: int) -> bool:
        """Whether somebody will join, or could, with room for so many more requests."""
        return self._reading is not None or (room > 0 and bool(self.waiting))

    def read(self, room: int) -> Batch | None:
        """Read one chunk of the prompts whose turn it is; their requests, once that was the last of it.

        They are still among `rows` then, and so whatever happens to them is somebody's business, until `joined`.
        """
        if self._reading is None:
            self._reading = self._next(room)
        if self._reading is None or not self._reading.read_prompts(self.chunk):
            return None
        ready, self._reading = self._reading, None
        return ready

    def joined(self) -> None:
        """The rows that `read` gave decode now."""
        self.requests = []

    def withdraw(self, request: Request) -> None:
        """A row that has ended while it waited, or while its prompt was read."""
        if request in self.waiting:
            self.waiting.remove(request)
        if all(reading.finish_reason for reading in self.requests):
            self.stop_reading()

    def stop_reading(self) -> None:
        """Forget those whose prompts are being read, and what has been read of them."""
        self.requests, self._reading = [], None

    def _next(self, room: int) -> Batch | None:
        requests = self.requests
        while self.waiting and len(requests) < room:
            following = self.waiting.peek()
            prefix = self._known(following)
            if requests and (prefix is not None or not self._side_by_side(following)):
                break
            requests.append(self.waiting.pop())
            if prefix is not None:
                requests[0].cached_tokens = prefix.length
                return Batch(self.target, self.proposer, requests, prefix, self.kv_bits)
            if not self._side_by_side(requests[0]):
                break
        return Batch(self.target, self.proposer, requests, kv_bits=self.kv_bits) if requests else None

    def _known(self, request: Request) -> Prefix | None:
        return self.prefixes.find(request.prompt) if self.prefixes is not None else None

    def _side_by_side(self, request: Request) -> bool:
        return self._may_pad and len(request.prompt) <= self.chunk + 1
