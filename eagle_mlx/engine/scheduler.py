"""Which requests come to decode, and when: whose turn it is, whose prompt is being read, who can join."""

from __future__ import annotations

from eagle_mlx.cache import may_pad
from eagle_mlx.engine.batch import Batch
from eagle_mlx.engine.prefill import Prefill
from eagle_mlx.engine.prefix import Prefix, PrefixCache
from eagle_mlx.engine.request_queue import RequestQueue
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.request import Request
from eagle_mlx.target import Target


class Scheduler:
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
        self.prefilling: list[Request] = []
        """Those whose prompts are being read, from when they stop waiting until `joined`."""
        self._prefill: Prefill | None = None

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.prefilling

    def wants_in(self, room: int) -> bool:
        """Whether somebody will join, or could, with room for so many more requests."""
        return self._prefill is not None or (room > 0 and bool(self.waiting))

    def prefill(self, room: int) -> Batch | None:
        """Read one chunk of the prompts whose turn it is; their batch, once that was the last of it.

        They are still among `prefilling` then, and so whatever happens to them is somebody's business, until `joined`.
        """
        if self._prefill is None:
            self._prefill = self._next(room)
        if self._prefill is None or not self._prefill.step(self.chunk):
            return None
        ready, self._prefill = self._prefill.batch, None
        return ready

    def joined(self) -> None:
        """The requests that `prefill` gave decode now."""
        self.prefilling = []

    def withdraw(self, request: Request) -> None:
        """A request that has ended while it waited, or while its prompt was read."""
        if request in self.waiting:
            self.waiting.remove(request)
        if all(reading.finish_reason for reading in self.prefilling):
            self.stop_prefill()

    def stop_prefill(self) -> None:
        """Forget those whose prompts are being read, and what has been read of them."""
        self.prefilling, self._prefill = [], None

    def _next(self, room: int) -> Prefill | None:
        requests = self.prefilling
        while self.waiting and len(requests) < room:
            following = self.waiting.peek()
            prefix = self._known(following)
            if requests and (prefix is not None or not self._side_by_side(following)):
                break
            requests.append(self.waiting.pop())
            if prefix is not None:
                requests[0].cached_tokens = prefix.length
                return Prefill(Batch(self.target, self.proposer, requests, prefix, self.kv_bits), prefix.length)
            if not self._side_by_side(requests[0]):
                break
        return Prefill(Batch(self.target, self.proposer, requests, kv_bits=self.kv_bits)) if requests else None

    def _known(self, request: Request) -> Prefix | None:
        return self.prefixes.find(request.prompt) if self.prefixes is not None else None

    def _side_by_side(self, request: Request) -> bool:
        return self._may_pad and len(request.prompt) <= self.chunk + 1
