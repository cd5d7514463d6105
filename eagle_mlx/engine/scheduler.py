"""Which requests come to decode, and when: whose turn it is, whose prompt is being read, who can join."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_mlx.cache import may_pad
from eagle_mlx.engine.batch import Batch
from eagle_mlx.engine.kv_budget import KVBudget
from eagle_mlx.engine.prefill import Prefill
from eagle_mlx.engine.prefix import Prefix, PrefixCache
from eagle_mlx.engine.request_queue import MOST_SKIPS, RequestQueue
from eagle_mlx.memory import FreedBuffers
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.request import Request
from eagle_mlx.target import Target


class Scheduler:
    """Reads the prompts of those whose turn it is, a chunk at a time, so that nobody waits long for a long prompt.

    Prompts that fit into one chunk together are read side by side, which bounds what a forward takes of memory. A
    longer one, or one whose beginning is in the prefix cache, is read alone.

    Between two chunks of a long prompt goes one of a prompt that has fewer left, be it one that waits. So a prompt that
    is shorter is never held up by two chunks of it in a row, and it takes at most twice as many steps.

    Whose keys and values would not fit beside those of the rows that decode waits for memory. Others that fit may pass,
    at most `MOST_SKIPS` of them; then nobody joins before it. Prefixes that are kept give way to rows.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        chunk: int,
        prefixes: PrefixCache | None = None,
        kv_bits: int | None = None,
        budget: KVBudget | None = None,
    ):
        self.target, self.proposer, self.chunk, self.prefixes = target, proposer, chunk, prefixes
        self.kv_bits, self.budget = kv_bits, budget
        self.waiting = RequestQueue(chunk)
        self.freed = FreedBuffers()
        if prefixes is not None and budget is not None:
            prefixes.spare = lambda: budget.nbytes - budget.set_aside(self.admitted)
        self._may_pad = may_pad(target.model)
        self._prefills: list[Prefill] = []
        """Those under way, the one that was begun first in front."""
        self._others_are_due = False
        """Whether the chunk read last was of the prompts that were begun first."""
        self._entering: list[Request] = []
        """Those that have stopped waiting and are not among the prefills, or not any more."""
        self._admitted: list[Request] = []
        self._passed: Request | None = None
        """Whose turn it was when others went before it."""
        self._passes = 0

    @property
    def admitted(self) -> list[Request]:
        """Those that decode, or whose prompts are being read. Any thread may ask."""
        return [request for request in self._admitted if request.finish_reason is None]

    @property
    def side_by_side(self) -> list[list[Request]]:
        """Those whose prompts are being read, as they share caches, from when they stop waiting until `joined`."""
        return [*(prefill.batch.requests for prefill in self._prefills), *([self._entering] if self._entering else [])]

    @property
    def prefilling(self) -> list[Request]:
        """All of them."""
        return [request for requests in self.side_by_side for request in requests]

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.prefilling

    def wants_in(self, room: int) -> bool:
        """Whether somebody will join, or could, with room for so many more requests."""
        return bool(self._prefills) or (room > 0 and self._following(room) is not None)

    def prefill(self, room: int) -> Batch | None:
        """Read one chunk of the prompts whose turn it is; their batch, once that was the last of it.

        They are still among `prefilling` then, and so whatever happens to them is somebody's business, until `joined`.
        """
        prefill = self._due(room)
        if prefill is None:
            return None
        self._others_are_due = prefill is self._prefills[0]
        is_read = prefill.step(self.chunk)
        self.freed.after_chunk()
        if not is_read or prefill not in self._prefills:  # all of it may have been withdrawn meanwhile
            return None
        self._prefills.remove(prefill)
        self._entering = list(prefill.batch.requests)
        return prefill.batch

    def joined(self) -> None:
        """The requests that `prefill` gave decode now."""
        self._entering = []

    def withdraw(self, request: Request) -> None:
        """A request that has ended while it waited, or while its prompt was read."""
        if request in self.waiting:
            self.waiting.remove(request)
        self._prefills = [each for each in self._prefills if not all(row.finish_reason for row in each.batch.requests)]
        if self.prefixes is not None and not self._prefills:
            self.prefixes.stop_fetching()

    def stop_prefill(self) -> None:
        """Forget those whose prompts are being read, and what has been read of them."""
        self._prefills, self._entering = [], []
        if self.prefixes is not None:
            self.prefixes.stop_fetching()

    def _due(self, room: int) -> Prefill | None:
        """Whose chunk is to be read: in turn the prompts that were begun first, and those that have least left."""
        room -= len(self.prefilling)
        if not self._prefills:
            return self._begin(room)
        if not self._others_are_due:
            return self._prefills[0]
        shortest = min(self._prefills, key=lambda each: each.left)
        chunks = -(-shortest.left // self.chunk)
        return (self._begin(room, chunks) if chunks > 1 else None) or shortest

    def _begin(self, room: int, chunks: int | None = None) -> Prefill | None:
        """Begin with those who are to join next, of prompts of fewer chunks than this where others are being read."""
        requests, known = self._entering, None
        while known is None and len(requests) < room:
            following = self._following(room - len(requests), chunks)
            if following is None or (requests and not self._side_by_side([*requests, following])):
                break
            if self.prefixes is not None and not self.prefixes.fetch(following.prompt, following.namespace):
                break  # the rest comes from the disk in the next steps
            known = self._known(following)
            if requests and known is not None:
                known = None
                break
            self._take(following, passes=chunks is None or not self._fits(self._turn()))
            requests.append(following)
        if not requests:
            return None
        if known is not None:
            requests[0].cached_tokens = known.length
        batch = Batch(self.target, self.proposer, requests, known, self.kv_bits)
        begun = Prefill(batch, known.length if known is not None else 0, self.prefixes)
        self._prefills.append(begun)
        self._entering = []
        return begun

    def _following(self, room: int, chunks: int | None = None) -> Request | None:
        """Who is to join next, with room for so many more; None where nobody waits, or whoever may join does not fit.

        chunks: more than a prompt may take, where others are being read that have so many left.

        Where all are in one group, and the longest row is what limits how many decode, others as long go before short
        ones: beside it they take no more, and by themselves they would take as much again.
        """
        if not self.waiting:
            return None
        turn = self._turn()
        if chunks is not None:
            may_pass = self._passes < MOST_SKIPS
            return self.waiting.first(
                lambda each: self.waiting.chunks(each) < chunks and (may_pass or each is turn) and self._fits(each)
            )
        if self.budget is None:
            return turn
        if self._passes < MOST_SKIPS:
            rows, reach = self.admitted, self.budget.reach
            longest = max(map(reach, rows), default=0)
            beside_longest = self.budget.size.nbytes(len(rows) + room, longest)
            if self.budget.groups == 1 and beside_longest > self.budget.nbytes:
                like = self.waiting.first(lambda request: 2 * reach(request) > longest and self._fits(request))
                if like is not None:
                    return like
            return turn if self._fits(turn) else self.waiting.first(self._fits)
        return turn if self._fits(turn) else None

    def _turn(self) -> Request:
        """Whose turn it is, or was when others went before it."""
        if self._passed is not None and self._passed.finish_reason is None:
            return self._passed
        self._passed, self._passes = None, 0
        return self.waiting.peek()

    def _fits(self, request: Request) -> bool:
        return self.budget is None or self.budget.fits([*self.admitted, request])

    def _take(self, request: Request, passes: bool = True) -> None:
        """passes: whether whoever goes before the one whose turn it is keeps that one from joining."""
        turn = self._turn()
        if request is turn:
            self._passed, self._passes = None, 0
        elif passes:
            self._passed, self._passes = turn, self._passes + 1
        self.waiting.take(request)
        self._admitted = [*self.admitted, request]
        if self.prefixes is not None:
            self.prefixes.trim()

    def _known(self, request: Request) -> Prefix | None:
        return self.prefixes.find(request.prompt, request.namespace) if self.prefixes is not None else None

    def _side_by_side(self, requests: Sequence[Request]) -> bool:
        """Whether one forward may read these prompts, each padded to the longest, but for their last tokens."""
        width = max(len(request.prompt) for request in requests) - 1
        if not self._may_pad or len(requests) * width > self.chunk:
            return False
        others = [request for request in self.admitted if request not in requests]
        return self.budget is None or self.budget.are_together(requests, others)
