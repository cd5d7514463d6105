"""Which requests come to decode, and when: whose turn it is, whose prompt is being read, who can join."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from eagle_mlx.cache import may_pad
from eagle_mlx.engine.batch import Batch
from eagle_mlx.engine.kv_budget import KVBudget
from eagle_mlx.engine.prefill import PREFILL_MS, ChunkSize, Prefill
from eagle_mlx.engine.prefix import PrefixCache
from eagle_mlx.engine.request_queue import MOST_SKIPS, RequestQueue
from eagle_mlx.memory import FreedBuffers
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.request_state import RequestState
from eagle_mlx.target import Target

_SLICE = 64
"""Rounds after which a client's only row is paused for a client that holds none: one to a few seconds of decoding."""
_READS_PER_ROUND = 8
"""Positions of its text for which such a row stays a round longer. To read 8 positions takes less than a round, so
that more time is spent on decoding than on reading texts again.
"""


class Admission:
    """Reads the prompts of those whose turn it is, a chunk at a time, so that nobody waits long for a long prompt.

    Prompts that fit into one chunk together are read side by side, which bounds what a forward takes of memory. A
    longer one, or one whose beginning is in the prefix cache, is read alone.

    Between two chunks of a long prompt goes one of a prompt that has fewer left, be it one that waits. So a prompt that
    is shorter is never held up by two chunks of it in a row, and it takes at most twice as many steps.

    Whose keys and values would not fit beside those of the rows that decode waits for memory. Others that fit may pass,
    at most `MOST_SKIPS` of them; then nobody joins before it. Prefixes that are kept give way to rows.

    If a request cannot join, a row of a client that holds at least two rows more than its own is paused for it, the
    newest first. A client's only row is paused for a client that holds none after `_SLICE` rounds. Rows that have grown
    beyond the memory are paused too, so that one is left at least.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        chunk: int,
        budget: KVBudget,
        prefixes: PrefixCache | None = None,
        kv_bits: int | None = None,
        prefill_ms: float = PREFILL_MS,
    ):
        self.target, self.proposer, self.chunk, self.prefixes = target, proposer, chunk, prefixes
        self.kv_bits, self.budget = kv_bits, budget
        self.waiting = RequestQueue(chunk, self._held)
        self.to_pause: list[RequestState] = []
        """Requests that somebody wants to be paused, whether or not others wait."""
        self._size = ChunkSize(chunk, prefill_ms / 1000)
        self._now, self._just_read = chunk, 0
        """Positions that the latest chunk was allowed, and those that it read."""
        self.freed = FreedBuffers()
        if prefixes is not None:
            prefixes.spare = lambda: budget.nbytes - budget.set_aside(self.admitted)
        self._may_pad = may_pad(target.model)
        self.prefills: list[Prefill] = []
        """Those under way, the one that was begun first in front."""
        self._others_are_due = False
        """Whether the chunk read last was of the prompts that were begun first."""
        self._entering: list[RequestState] = []
        """Those that have stopped waiting and are not among the prefills, or not any more."""
        self._admitted: list[RequestState] = []
        self._passed: RequestState | None = None
        """Whose turn it was when others went before it."""
        self._passes = 0

    @property
    def admitted(self) -> list[RequestState]:
        """Those that decode, or whose prompts are being read. Any thread may ask."""
        return [request for request in self._admitted if request.finish_reason is None]

    @property
    def side_by_side(self) -> list[list[RequestState]]:
        """Those whose prompts are being read, as they share caches, from when they stop waiting until `joined`."""
        return [*(prefill.batch.requests for prefill in self.prefills), *([self._entering] if self._entering else [])]

    @property
    def prefilling(self) -> list[RequestState]:
        """All of them."""
        return [request for requests in self.side_by_side for request in requests]

    @property
    def idle(self) -> bool:
        return not self.waiting.clients and not self.prefilling

    def wants_in(self, room: int, groups: Sequence[Sequence[RequestState]]) -> bool:
        """Return whether a request will join, or could, with room for so many more, or should be paused."""
        joins = bool(self.prefills) or (room > 0 and self.following() is not None)
        return joins or bool(self.yielding(room, groups))

    def yielding(self, room: int, groups: Sequence[Sequence[RequestState]]) -> list[RequestState]:
        """Return the requests that are to be paused, so that memory suffices and whose turn it is can join.

        groups: the requests that decode. No round of theirs may be under way when they are paused.
        """
        self.to_pause = [row for row in self.to_pause if row.finish_reason is None]
        wanted = [row for row in self._pausable() if row in self.to_pause] if self.to_pause else []
        return wanted or self._outgrown(groups) or self._in_the_way(room)

    def pause(self, requests: Sequence[RequestState]) -> None:
        """Have requests wait again, before others of their clients. Rows that decode are still to leave their batch."""
        self.to_pause = [request for request in self.to_pause if request not in requests]
        self._admitted = [request for request in self.admitted if request not in requests]
        self.prefills = [each for each in self.prefills if set(requests).isdisjoint(each.batch.requests)]
        for request in requests:
            request.pause()
            self.waiting.append(request)

    def _outgrown(self, groups: Sequence[Sequence[RequestState]]) -> list[RequestState]:
        """Return the rows without which the others fit into the memory as they are now."""
        together, gone = [*groups, *self.side_by_side], list[RequestState]()
        while self.budget.used(together) > self.budget.nbytes and len(self.admitted) > len(gone) + 1:
            victim = _newest(self._pausable(gone), self._held(gone))
            if victim is None:
                break
            gone.append(victim)
            together = [[each for each in group if each not in gone] for group in together]
        return gone

    def _in_the_way(self, room: int) -> list[RequestState]:
        """Return the rows whose pausing lets the request join whose turn it is; none if it need not, or would not."""
        if not self.waiting.clients:
            return []
        turn, gone = self.turn(), list[RequestState]()
        if self.prefills and self._steps(turn.length) >= self._steps(min(each.left for each in self.prefills)):
            return []  # it would not be begun now
        room -= len(self.prefilling)
        while room + len(gone) < 1 or not self._fits(turn, gone):
            victim = self._victim(turn.client, gone)
            if victim is None:
                return []
            gone.append(victim)
        return gone

    def _victim(self, client: str, gone: Sequence[RequestState]) -> RequestState | None:
        """Return the next row to be paused for a client, beside those that are `gone`; None if each has its share."""
        held, able = self._held(gone), self._pausable(gone)
        if max(held.values(), default=0) >= held[client] + 2:
            return _newest([row for row in able if held[row.client] >= held[client] + 2], held)
        if held[client]:
            return None
        served = [row for row in able if row.rounds_since >= max(_SLICE, row.length // _READS_PER_ROUND)]
        return max(served, key=lambda row: row.rounds_since, default=None)

    def _pausable(self, gone: Sequence[RequestState] = ()) -> list[RequestState]:
        """Return the requests that may be paused, in the order in which more is lost by it.

        A row that decodes must have had a round since it was admitted, which has checked its keys and values. A row
        whose masks are late is verified first. Prompts that are read side by side will have been read in a step or two.
        """
        alone = [each.batch.requests[0] for each in self.prefills if len(each.batch.requests) == 1]
        prefilling = set(self.prefilling)
        rows = [
            row
            for row in self.admitted
            if row not in gone and row not in prefilling and row.rounds_since and row.asked is None
        ]
        return [*(row for row in alone if row not in gone and row.finish_reason is None), *rows]

    def _held(self, gone: Sequence[RequestState] = ()) -> Counter[str]:
        """Return how many rows each client holds without those that are `gone`. Any thread may ask."""
        return Counter(row.client for row in self.admitted if row not in gone)

    def due(self, room: int, decoding: bool = False) -> Prefill | None:
        """Return the prompts of which a chunk is to be read next, with room for so many more requests.

        decoding: whether others decode, and so wait for it.
        """
        if not self.prefills and not self.waiting.clients:
            return None
        self._now = self._size.now(decoding)
        prefill = self._due(room)
        if prefill is not None:
            self._others_are_due = prefill is self.prefills[0]
        return prefill

    def read(self, prefill: Prefill) -> None:
        """Read the chunk of the prompts that are due."""
        before = prefill.left
        prefill.step(self._now)
        self._just_read = before - prefill.left
        self.freed.after_chunk()

    def has_read(self, prefill: Prefill, seconds: float) -> Batch | None:
        """Learn the time of the chunk, for the size of the next one; return the batch if that was the last chunk.

        The requests of the batch are among `prefilling` until `joined` is called: they end with an error if anything
        fails in between.
        """
        self._size.took(self._just_read, seconds)
        if prefill.left or prefill not in self.prefills:  # all of it may have been withdrawn meanwhile
            return None
        self.prefills.remove(prefill)
        self._entering = list(prefill.batch.requests)
        return prefill.batch

    def joined(self) -> None:
        """Note that the requests that `has_read` gave decode now."""
        self._entering = []

    def withdraw(self, request: RequestState) -> None:
        """A request that has ended while it waited, or while its prompt was read."""
        if request in self.waiting:
            self.waiting.remove(request)
        self.prefills = [each for each in self.prefills if not all(row.finish_reason for row in each.batch.requests)]
        if self.prefixes is not None and not self.prefills:
            self.prefixes.stop_fetching()

    def stop_prefill(self) -> None:
        """Forget those whose prompts are being read, and what has been read of them."""
        self.prefills, self._entering = [], []
        if self.prefixes is not None:
            self.prefixes.stop_fetching()

    def _due(self, room: int) -> Prefill | None:
        """Whose chunk is to be read: in turn the prompts that were begun first, and those that have least left."""
        room -= len(self.prefilling)
        if not self.prefills:
            return self._begin(room)
        if not self._others_are_due:
            return self.prefills[0]
        shortest = min(self.prefills, key=lambda each: each.left)
        chunks = self._steps(shortest.left)
        return (self._begin(room, chunks) if chunks > 1 else None) or shortest

    def _begin(self, room: int, chunks: int | None = None) -> Prefill | None:
        """Begin with those who are to join next, of prompts of fewer chunks than this where others are being read."""
        requests, known = self._entering, None
        while known is None and len(requests) < room:
            following = self.following(chunks)
            if following is None or (requests and not self._side_by_side([*requests, following])):
                break
            if self.prefixes is not None:
                text, namespace = following.text, following.request.namespace
                if not self.prefixes.fetch(text, namespace):
                    break  # the rest comes from the disk in the next steps
                known = self.prefixes.find(text, namespace)
            if requests and known is not None:
                known = None
                break
            self.take(following, passes=chunks is None or not self._fits(self.turn()))
            requests.append(following)
        if not requests:
            return None
        if known is not None and not requests[0].pauses:
            requests[0].begin_with(known.length)
        batch = Batch(self.target, self.proposer, requests, known, self.kv_bits)
        begun = Prefill(batch, known.length if known is not None else 0, self.prefixes)
        self.prefills.append(begun)
        self._entering = []
        return begun

    def following(self, chunks: int | None = None) -> RequestState | None:
        """Return who is to join next; None if nobody waits, or if whoever may join does not fit.

        chunks: more than a prompt may take, because others are being read that have so many left.
        """
        if not self.waiting.clients:
            return None
        turn = self.turn()
        if chunks is not None:
            may_pass = self._passes < MOST_SKIPS
            return self.waiting.first(
                lambda each: self._steps(each.length) < chunks and (may_pass or each is turn) and self._fits(each)
            )
        if self._fits(turn):
            return turn
        return self.waiting.first(self._fits) if self._passes < MOST_SKIPS else None

    def turn(self) -> RequestState:
        """Return whose turn it is, or was when others went before it, unless its client holds more rows by now."""
        if self._passed is not None and self._passed.finish_reason is None:
            held, following = self._held(), self.waiting.peek()
            return following if held[following.client] < held[self._passed.client] else self._passed
        self._passed, self._passes = None, 0
        return self.waiting.peek()

    def _fits(self, request: RequestState, gone: Sequence[RequestState] = ()) -> bool:
        return self.budget.fits([*(row for row in self.admitted if row not in gone), request])

    def _steps(self, positions: int) -> int:
        """Return the chunks of the present size that so many positions take."""
        return max(1, -(-positions // self._now))

    def take(self, request: RequestState, passes: bool = True) -> None:
        """passes: whether whoever goes before the one whose turn it is keeps that one from joining."""
        turn = self.turn()
        if request is turn or request is self._passed:
            self._passed, self._passes = None, 0
        elif passes:
            self._passed, self._passes = turn, self._passes + 1
        self.waiting.take(request)
        request.admit()
        self._admitted = [*self.admitted, request]
        if self.prefixes is not None:
            self.prefixes.trim()

    def _side_by_side(self, requests: Sequence[RequestState]) -> bool:
        """Whether one forward may read these prompts, each padded to the longest, but for their last tokens."""
        width = max(request.length for request in requests)
        if not self._may_pad or len(requests) * width > self._now:
            return False
        others = [request for request in self.admitted if request not in requests]
        return self.budget.are_together(requests, others)


def _newest(rows: Sequence[RequestState], held: Mapping[str, int]) -> RequestState | None:
    """Return the last of the rows whose client holds most of all rows; None if there are none."""
    most = max((held[row.client] for row in rows), default=0)
    return next((row for row in reversed(rows) if held[row.client] == most), None)
