"""Admission of requests: the queue, which prompts are being read, and which requests must be paused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile, zip_longest

from eagle_mlx.cache import may_pad
from eagle_mlx.engine.batch import Batch
from eagle_mlx.engine.collector import Collector
from eagle_mlx.engine.groups import KVBudget
from eagle_mlx.engine.prefill import Prefill
from eagle_mlx.engine.prefix import Prefix, PrefixCache
from eagle_mlx.memory import FreedBuffers
from eagle_mlx.plan import LEAST_CHUNK, PREFILL_MS
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.request_state import RequestState
from eagle_mlx.target import Target

_SLICE = 64  # rounds after which a client's only row may be paused for a client without rows: a few seconds of decoding
_READS_PER_ROUND = 8
"""Such a row stays one more round per 8 positions of its text. Reading 8 positions again takes less than a round."""
MOST_SKIPS = 8  # how often others may pass a request that does not fit: the default batch size
_LOOKED_AT = 32  # number of waiting requests that are checked in one step, because each check takes time


@dataclass(frozen=True)
class Fetch:
    """Look for cached prefixes of waiting requests, until one has a prefix or needs more steps to read it from disk."""

    requests: Sequence[RequestState]
    touches: Sequence[RequestState] = ()  # none: no request needs a cached prefix


@dataclass(frozen=True)
class Admit:
    """Take requests from the queue and start their prefill. A chunk of at most `positions` is read next."""

    touches: Sequence[RequestState]
    prefix: Prefix | None  # cached, of a single request
    positions: int


@dataclass(frozen=True)
class Read:
    """Read a chunk of at most `positions` of a prefill's prompts."""

    prefill: Prefill
    positions: int

    @property
    def touches(self) -> list[RequestState]:
        return list(self.prefill.batch.requests)


class RequestQueue:
    """Lets clients take turns, so that a client with many requests does not block others.

    Clients with fewer rows go first, then those that have waited longest for their turn. Within a client, requests go
    in order of arrival, but paused ones go before all others.
    """

    def __init__(self, rows: Callable[[], Sequence[RequestState]] = list, of: RequestQueue | None = None):
        """`rows`: returns the clients' rows. `of`: a queue to copy; take from the copy to see which requests follow."""
        self._rows = rows
        self.lines: dict[str, list[RequestState]] = {} if of is None else of.lines
        """The waiting requests of each client, in turn. It is replaced, never changed: other threads read it, and no
        interrupt may lose a request."""
        self._skips: Counter[RequestState] = Counter(() if of is None else of._skips)

    def __len__(self) -> int:
        return sum(map(len, self.lines.values()))

    def __iter__(self) -> Iterator[RequestState]:
        """Yield the requests in the order in which they are admitted if all fit and none arrive. Thread-safe."""
        held = Counter(row.client for row in self._rows())
        in_turn = [line for _, line in sorted(self.lines.items(), key=lambda named: held[named[0]])]
        return (request for turn in zip_longest(*in_turn) for request in turn if request is not None)

    def append(self, request: RequestState) -> None:
        line = self.lines.get(request.client, [])
        # A paused one's client has had its turn. The newest row is paused first, and resumed last.
        line = [request, *line] if request.paused else [*line, request]
        self._replace(request.client, line, to_end=request.paused)

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
        passed = takewhile(lambda other: other is not request, self)
        self._skips.update([other for other in passed if not fits(other)])
        self._skips.pop(request, None)
        line = [other for other in self.lines[request.client] if other is not request]
        self._replace(request.client, line, to_end=True)

    def remove_ended(self) -> None:
        for client, line in self.lines.items():
            self._replace(client, [row for row in line if row.finish_reason is None])
        self._skips = Counter({row: count for row, count in self._skips.items() if row.finish_reason is None})

    def _replace(self, client: str, line: list[RequestState], to_end: bool = False) -> None:
        others = {name: other for name, other in self.lines.items() if not (to_end and name == client)}
        self.lines = {name: other for name, other in {**others, client: line}.items() if other}


class Admission:
    """Admits requests in turn and reads their prompts in chunks, so that long prompts do not hold up the others.

    Prompts that fit into one chunk together are read in one batch. A longer prompt, or one that starts with a cached
    prefix, is read alone; its chunks alternate with those of shorter prompts, including prompts that still wait.

    A request waits if its KV cache does not fit. The prefix cache gives up memory for rows. If a request cannot join,
    it may replace the newest row of a client that has at least two more rows than its own. After `_SLICE` rounds, a
    client's only row may be paused for a client without rows. If rows outgrow the memory, all but one may be paused.
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
        collector: Collector | None = None,
    ):
        self.target, self.proposer = target, proposer
        self.chunk, self.kv_bits = chunk, kv_bits
        self.budget, self.prefixes = budget, prefixes
        self.collector = collector
        self.waiting = RequestQueue(lambda: budget.admitted)
        self.to_pause: list[RequestState] = []
        self._seconds, self._speed = prefill_ms / 1000, 0.0
        """The time that a chunk may take while others decode, and the positions per second of the last full one."""
        self._now = chunk  # the size limit of the latest chunk
        self.freed = FreedBuffers()
        self._may_pad = may_pad(target.model) and (proposer is None or proposer.abilities.may_pad)
        self.prefills: list[Prefill] = []  # prefills in progress, oldest first
        self._others_are_due = False  # whether the last chunk belonged to the oldest prefill
        self.fetched: dict[RequestState, Prefix | None] = {}  # cached prefixes of the next requests to admit

    @property
    def side_by_side(self) -> list[list[RequestState]]:
        """The requests in prefill, by the caches that they share."""
        return [prefill.batch.requests for prefill in self.prefills]

    @property
    def prefilling(self) -> list[RequestState]:
        return [request for requests in self.side_by_side for request in requests]

    def yielding(self, room: int, groups: Sequence[Sequence[RequestState]]) -> list[RequestState]:
        """Return the requests to pause so that memory suffices and the next request can join. groups: the requests that
        decode. None of their rounds may be in progress when they are paused."""
        wanted = [row for row in self._pausable() if row in self.to_pause] if self.to_pause else []
        return wanted or self._outgrown(groups) or self._in_the_way(room)

    def pause(self, requests: Sequence[RequestState]) -> None:
        """Return requests to the queue, ahead of their clients' others. The caller removes rows from batches."""
        self.to_pause = [row for row in self.to_pause if row not in requests and row.finish_reason is None]
        self.budget.rows = [request for request in self.budget.admitted if request not in requests]
        self.prefills = [prefill for prefill in self.prefills if set(requests).isdisjoint(prefill.batch.requests)]
        for request in requests:
            request.pause()
            self.waiting.append(request)

    def _outgrown(self, groups: Sequence[Sequence[RequestState]]) -> list[RequestState]:
        """Return a row to pause if all do not fit into memory at their current lengths. A step asks until they do."""
        if self.budget.used([*groups, *self.side_by_side]) <= self.budget.nbytes or len(self.budget.admitted) < 2:
            return []
        victim = _newest(self._pausable(), self._held())
        return [] if victim is None else [victim]

    def _in_the_way(self, room: int) -> list[RequestState]:
        """Return the rows to pause so that the next request can join; none if that is unnecessary or not enough."""
        if not self.waiting.lines:
            return []
        turn, gone, rows = next(iter(self.waiting)), list[RequestState](), self.budget.admitted
        if self.prefills and turn.length > self._passing(self._now):
            return []  # its prefill would not start now
        room -= len(self.prefilling)
        while room + len(gone) < 1 or not self.budget.fits([row for row in rows if row not in gone], turn):
            victim = self._victim(turn.client, gone)
            if victim is None:
                return []
            gone.append(victim)
        return gone

    def _victim(self, client: str, gone: Sequence[RequestState]) -> RequestState | None:
        held, able = self._held(gone), self._pausable(gone)
        if max(held.values(), default=0) >= held[client] + 2:
            return _newest([row for row in able if held[row.client] >= held[client] + 2], held)
        if held[client]:
            return None
        served = [row for row in able if row.counts.rounds_since >= max(_SLICE, row.length // _READS_PER_ROUND)]
        return max(served, key=lambda row: row.counts.rounds_since, default=None)

    def _pausable(self, gone: Sequence[RequestState] = ()) -> list[RequestState]:
        """Return the requests that may be paused, cheapest first.

        A decoding row must have had a round since its admission, because that round checks its keys and values. Prompts
        read in one batch finish within a step or two.
        """
        prefilling = set(self.prefilling)
        alone = [prefill.batch.requests[0] for prefill in self.prefills if len(prefill.batch.requests) == 1]
        decoding = [row for row in self.budget.admitted if row not in prefilling and row.counts.rounds_since]
        return [row for row in (*alone, *decoding) if row.finish_reason is None and row not in gone]

    def _held(self, gone: Sequence[RequestState] = ()) -> Counter[str]:
        """Return the number of rows per client, except those in `gone`."""
        return Counter(row.client for row in self.budget.admitted if row not in gone)

    def due(self, room: int, decoding: bool, may_fetch: bool) -> Fetch | Admit | Read | None:
        """Return the next work for prompts, if there is any. The oldest prefill and the shortest alternate. room: free
        rows, including those of prefills. decoding: whether other requests decode, and so wait for it. may_fetch:
        whether this step may look for prefixes."""
        chunk = self.chunk
        if decoding:
            chunk = min(chunk, max(LEAST_CHUNK, int(self._speed * self._seconds)))
        room -= len(self.prefilling)
        if not self.prefills:
            return self._admit(room, chunk, may_fetch) if room > 0 else None
        if not self._others_are_due:
            return Read(self.prefills[0], chunk)
        shorter = self._passing(chunk)
        entering = self._admit(room, chunk, may_fetch, shorter) if shorter and room > 0 else None
        return entering or Read(min(self.prefills, key=lambda prefill: prefill.left), chunk)

    def _passing(self, chunk: int) -> int:
        """Return the length of the longest prompt whose prefill may start now, before the others end: it needs fewer
        chunks than they do, or if one chunk is left, fewer positions. None may right after another of them."""
        if not self._others_are_due:
            return 0
        left = min(prefill.left for prefill in self.prefills)
        return max(0, chunk * (-(-left // chunk) - 1) or left - 1)

    def read(self, work: Read, lap: Callable[[], float]) -> None:
        """Read a chunk of prompts and learn its speed. lap: returns the seconds since it was last called."""
        before, self._now = work.prefill.left, work.positions
        self._others_are_due = work.prefill is self.prefills[0]
        lap()
        work.prefill.step(work.positions)
        self.freed.after_step(is_last=True)
        positions, seconds = before - work.prefill.left, lap()
        if positions >= min(LEAST_CHUNK, self.chunk) and seconds > 0:  # shorter ones mostly read the weights
            self._speed = positions / seconds

    def joined(self, batch: Batch) -> None:
        self.prefills = [prefill for prefill in self.prefills if prefill.batch is not batch]

    def remove_ended(self) -> None:
        """Remove requests that ended while they waited, and prefills of which all requests ended."""
        self.waiting.remove_ended()
        self.budget.rows = self.budget.admitted
        self.fetched = {}
        self.prefills = [
            prefill for prefill in self.prefills if not all(row.finish_reason for row in prefill.batch.requests)
        ]
        if self.prefixes is not None and not self.prefills:
            self.prefixes.stop_fetching()

    def _admit(self, room: int, chunk: int, may_fetch: bool, longest: int | None = None) -> Fetch | Admit | None:
        """Return the work for the next requests of the queue, if there are any. Those without a cached prefix are read
        together. longest: most positions of their prompts."""
        requests, rows = list[RequestState](), self.budget.admitted
        queue, fits = RequestQueue(lambda: rows, self.waiting), partial(self.budget.fits, rows)
        while len(requests) < room:
            following = queue.first(lambda row: (longest is None or row.length <= longest) and fits(row))
            if following is None or (requests and not self._side_by_side([*requests, following], chunk)):
                break
            queue.take(following, fits)
            requests.append(following)
            rows.append(following)
        if self.prefixes is not None:
            if may_fetch and not self.fetched.keys() >= set(requests):
                return Fetch(requests)
            requests = [*takewhile(self.fetched.__contains__, requests)]  # the others are fetched in the next steps
        if not requests:
            return None
        together = [*takewhile(lambda request: self.fetched.get(request) is None, requests)]
        return Admit(together or requests[:1], self.fetched.get(requests[0]), chunk)

    def fetch(self, work: Fetch) -> None:
        """Look for prefixes. A bounded amount is read from disk, because other requests decode meanwhile."""
        assert self.prefixes is not None
        for request in work.requests:
            about = request.text, request.request.namespace, request.request.images
            if not self.prefixes.fetch(*about):
                break
            self.fetched[request] = prefix = self.prefixes.find(*about)
            if prefix is not None:
                break

    def open(self, work: Admit) -> None:
        """Start the prefill of requests, which leave the queue."""
        self.fetched = {}
        if work.prefix is not None:
            work.touches[0].counts.reuse(work.prefix.length)
        proposer = self.proposer if work.touches[0].counts.may_draft else None
        batch = Batch(self.target, proposer, work.touches, work.prefix, self.kv_bits, self.collector)
        cached = work.prefix.length if work.prefix is not None else 0
        # First, so that other threads see the requests in the queue or here.
        self.prefills.append(Prefill(batch, cached, self.prefixes))
        for request in work.touches:
            self.take(request)

    def take(self, request: RequestState) -> None:
        self.waiting.take(request, partial(self.budget.fits, self.budget.admitted))
        request.admit()
        self.budget.rows = [*self.budget.admitted, request]
        if self.prefixes is not None:
            self.prefixes.trim()

    def _side_by_side(self, requests: Sequence[RequestState], chunk: int) -> bool:
        """Return whether one forward may read these prompts, padded to the longest; their last tokens are not read."""
        positions = len(requests) * max(request.length for request in requests)
        if not self._may_pad or positions > chunk or not all(request.counts.may_draft for request in requests):
            return False
        if any(request.request.images for request in requests):  # whose embeddings may fail
            return False
        return any(set(requests) <= set(group) for group in self.budget.grouped([*requests, *self.budget.admitted]))


def _newest(rows: Sequence[RequestState], held: Mapping[str, int]) -> RequestState | None:
    """Return the last row of a client with the most rows; None if there are no rows."""
    return max(reversed(rows), key=lambda row: held[row.client], default=None)
