"""Groups of rows: either one batch, or two batches, of long and of short rows, that take turns; and their memory.

All rows of a batch are padded to the longest. Two groups of similar lengths read fewer keys and values, but read the
weights twice. The decision depends on bytes, computed from shapes and lengths, and never on time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx

from eagle_mlx.cache.ragged import CacheSize, RaggedCache
from eagle_mlx.engine.batch import Batch
from eagle_mlx.errors import PromptError, check, require
from eagle_mlx.memory import gb
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.request import Request
from eagle_mlx.request_state import RequestState
from eagle_mlx.target import Target

GROUPS = 2
"""Maximum number of groups. A third would read the weights once more, but save less padding than the second."""
_RESERVE = 2048
"""Most answers are shorter. If a request reserved all that agents allow, tens of thousands of tokens, few could decode
together."""
_LOOK = 16
"""Rounds between two checks whether rows have outgrown their group. A check takes 0.4 ms for 64 rows on a CPU."""
_ROUND = 32 << 20
"""Fixed cost of a round, in bytes read in the same time: twice the cost measured on a CPU (docs/decisions.md)."""
_PAID_BACK = 64
"""Rounds within which a copy must pay for itself. Most answers have more."""


Places = tuple[int, ...]  # the group of each row, 0 or 1


@dataclass(frozen=True)
class RoundReads:
    """Bytes that a round reads: a fixed part, and a part per position of the padded rows."""

    fixed: int
    position: int  # for full attention and the proposer; sliding windows and recurrent states do not grow

    @classmethod
    def of(cls, target: Target, proposer: Proposer | None, size: CacheSize) -> RoundReads:
        drafts = proposer.weight_bytes if proposer is not None else 0
        return cls(target.weight_bytes + drafts + _ROUND, size.position)


class Row(NamedTuple):
    length: int  # positions in the caches; 0 during prefill, because rounds do not read them
    reach: int  # positions reserved for it
    group: int | None = None  # None if it is not in a group yet


def arrange(rows: Sequence[Row], reads: RoundReads, size: CacheSize, allowed: int) -> Places:
    """Return the groups that minimize the bytes read per round, including the copies to form them. Memory comes first:
    if one group could exceed `allowed` bytes, they take no more bytes than those of `by_reach`."""
    lengths, wanted = [row.length for row in rows], by_reach([row.reach for row in rows], size, allowed)
    stay = {row.group for row in rows if row.group is not None}
    padding = sum(max(lengths, default=0) - length for length in lengths if length)
    if len(stay) < 2 and not any(wanted) and padding * reads.position <= reads.fixed:
        return (min(stay, default=0),) * len(rows)
    most = _taken(wanted, rows, size)
    choices = [tuple(group if row.group is None else row.group for row in rows) for group in (0, 1)]
    for places in ((0,) * len(rows), split(lengths), wanted):
        choices += [places, tuple(1 - group for group in places)]
    possible = [places for places in choices if _taken(places, rows, size) <= most]
    return min(possible, key=lambda places: _price(places, rows, reads))  # ties: the first, which moves no row


def _taken(places: Places, rows: Sequence[Row], size: CacheSize) -> int:
    reaches = [[row.reach for row, group in zip(rows, places, strict=True) if group == at] for at in range(GROUPS)]
    return sum(size.nbytes(len(group), max(group, default=0)) for group in reaches)


def _price(places: Places, rows: Sequence[Row], reads: RoundReads) -> float:
    """Return the bytes that a round of each group reads, plus its share of the cost of copies."""
    both = list(zip(rows, places, strict=True))
    lengths = [[row.length for row, group in both if group == at and row.length] for at in range(GROUPS)]
    read = sum(reads.fixed + len(group) * max(group) * reads.position for group in lengths if group)
    moved = sum(row.length for row, to in both if row.group not in (None, to))
    return read + 2 * moved * reads.position / _PAID_BACK  # a copy reads and writes


def by_reach(reaches: Sequence[int], size: CacheSize, allowed: int) -> Places:
    """Return one group if it fits at the rows' reserved lengths, else the two groups with the least padding."""
    together = size.nbytes(len(reaches), max(reaches, default=0))
    return (0,) * len(reaches) if together <= allowed else split(reaches)


def split(lengths: Sequence[int]) -> Places:
    """Return the two groups with the least padding, the longest rows in group 1; one if a second saves nothing."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])

    def saved(count: int) -> int:
        return (len(order) - count) * (lengths[order[0]] - lengths[order[count]])

    long = set(order[: max(range(len(order)), key=saved, default=0)])
    return tuple(int(row in long) for row in range(len(lengths)))


def size_of(target: Target, proposer: Proposer | None, kv_bits: int | None) -> CacheSize:
    """Return the cache size of a target and its proposer. Nothing is evaluated: only shapes matter."""
    cache = RaggedCache.of(target.model, 1, kv_bits)
    target.forward(mx.zeros((1, 1), mx.int32), cache)
    return CacheSize.of(cache) + (proposer.cache_size() if proposer is not None else CacheSize())


class KVBudget:
    """Limit of bytes for the KV caches of rows and of the prefix cache. All rows of a group take as much memory as the
    longest, so long and short rows may fit only in separate groups."""

    def __init__(self, nbytes: int, size: CacheSize, context: int, groups: int = 1):
        self.nbytes, self.size = nbytes, size
        self.groups = groups
        self.reserve = _RESERVE  # the most tokens reserved beyond a row's length
        self.rows: list[RequestState] = []
        """The rows that take memory, and some that ended. It is replaced, never changed: other threads read it."""
        self.longest = bisect_right(range(1, context + 1), nbytes, key=lambda length: size.nbytes(1, length))
        """Maximum positions of a single row."""

    @property
    def admitted(self) -> list[RequestState]:
        """The requests that decode or have their prompts read. Thread-safe."""
        return [request for request in self.rows if request.finish_reason is None]

    def spare(self) -> int:
        """Return the bytes that rows leave to the prefix cache."""
        return self.nbytes - self.set_aside(self.admitted)

    def limited(self, request: Request) -> Request:
        """Return the request with a limit that fits. Raises PromptError if its prompt does not fit even alone."""
        prompt = len(request.prompt)
        if prompt >= self.longest:
            raise PromptError(
                f"a prompt of {prompt} tokens needs a KV cache of {gb(self.size.nbytes(1, prompt + 1))}, but the limit "
                f"is {gb(self.nbytes)}, enough for {self.longest} tokens; shorten the prompt, or raise the limit with "
                "kv_bytes (--kv-gb)"
            )
        return replace(request, limit=min(request.limit, self.longest - prompt))

    def reach(self, request: RequestState) -> int:
        return min(len(request.prompt) + request.limit, request.length + self.reserve)

    def set_aside(self, requests: Sequence[RequestState]) -> int:
        grouped = self.grouped(requests)
        caches = sum(self.size.nbytes(len(group), max(map(self.reach, group))) for group in grouped)
        return caches + sum(request.image_bytes for request in requests)

    def fits(self, rows: Sequence[RequestState], request: RequestState) -> bool:
        """Return whether a request may decode together with these rows. A single request always may."""
        return not rows or self.set_aside([*rows, request]) <= self.nbytes

    def used(self, groups: Sequence[Sequence[RequestState]], part: CacheSize | None = None) -> int:
        """Return an upper bound of the bytes that these groups take now; `part`: of a part of the caches only."""
        lengths, size = [[request.length for request in group] for group in groups], part or self.size
        images = 0 if part else sum(request.image_bytes for group in groups for request in group)
        return images + sum(size.nbytes(len(group), max(group, default=0)) for group in lengths)

    def grouped(self, requests: Sequence[RequestState]) -> list[list[RequestState]]:
        """Return the groups of requests if memory decides."""
        if self.groups == 1:
            return [list(requests)] if requests else []
        places = by_reach([self.reach(request) for request in requests], self.size, self.nbytes)
        groups = [[row for row, place in zip(requests, places, strict=True) if place == at] for at in range(GROUPS)]
        return [group for group in groups if group]


def check_settings(
    chunk: int, prefix_bytes: int, kv_bytes: int | None, prefill_ms: float, kv_bits: int | None, groups: int
) -> None:
    """Raise ConfigError if a setting of the engine is invalid."""
    require("prefill_chunk", chunk, int, "an integer of at least 1", 1)
    require("kv_bytes", 1 if kv_bytes is None else kv_bytes, float, "a number of at least 1, or None", 1)
    require("prefix_cache_bytes", prefix_bytes, float, "a number of at least 0", 0)
    require("prefill_ms", prefill_ms, float, "a number above 0", 1e-9)
    check(groups in range(1, GROUPS + 1), f"groups must be 1 or {GROUPS}; got {groups!r}")
    check(kv_bits in (None, 4, 8), f"kv_bits must be 4, 8 or None; got {kv_bits!r}")


class Groups:
    """The groups, their turns, and the moves of rows between them.

    A group keeps its number while it has rows. `arrange` assigns rows to 0 or 1 by the bytes of rounds and of memory;
    number 2 is for rows that may not draft, because the proposer failed too often.
    """

    def __init__(self, reads: RoundReads, budget: KVBudget):
        self.reads, self.budget = reads, budget
        self._served = self._rounds = 0  # the group that had the last round, and the number of rounds
        self._check_at = 0  # the number of rounds at which `moves` checks whether a row has to move
        self._groups: dict[int, Batch] = {}
        """By number, in order. It is replaced, never changed: other threads read it."""

    @property
    def batches(self) -> list[Batch]:
        return list(self._groups.values())

    @property
    def requests(self) -> list[RequestState]:
        return [request for batch in self.batches for request in batch.requests]

    @property
    def decoding(self) -> list[list[RequestState]]:
        return [batch.requests for batch in self.batches]

    @property
    def outgrown(self) -> bool:
        """Whether the rows that decode take more memory than there is."""
        return self.budget.used(self.decoding) > self.budget.nbytes

    def number(self, batch: Batch) -> int:
        return next(number for number, other in self._groups.items() if other is batch)

    def holding(self, request: RequestState) -> Batch | None:
        return next((batch for batch in self.batches if request in batch.requests), None)

    def following(self, batch: Batch | None = None) -> Batch:
        """Return the group whose turn comes after this one, or after the one that had the last round."""
        last = self._served if batch is None else self.number(batch)
        return self._groups[min(self._groups, key=lambda number: (number <= last, number))]

    def change(self) -> None:
        """Let `moves` check again whether rows have to move, because requests come or leave."""
        self._check_at = 0

    def begin_round(self) -> None:
        """Let `moves` check again in `_LOOK` rounds, because no row has to move now, and rows grow slowly."""
        if self._rounds >= self._check_at:
            self._check_at = self._rounds + _LOOK

    def end_round(self, batch: Batch) -> int:
        """Count a round of a group, and return the group's number."""
        self._served, self._rounds = self.number(batch), self._rounds + 1
        return self._served

    def moves(self, prefilling: Sequence[RequestState], joining: Batch | None = None) -> dict[RequestState, int] | None:
        """Return the group for each request, including those in prefill, or None if no row has to move, or if that need
        not be checked now."""
        if joining is None and self._rounds < self._check_at:
            return None
        groups = {request: number for number, batch in self._groups.items() for request in batch.requests}
        places = self._places(groups, prefilling, joining.requests if joining is not None else ())
        moving = joining is not None or any(places[request] != number for request, number in groups.items())
        return places if moving else None

    def _places(
        self, groups: Mapping[RequestState, int], prefilling: Sequence[RequestState], joining: Sequence[RequestState]
    ) -> dict[RequestState, int]:
        everyone = dict.fromkeys([*groups, *prefilling], GROUPS)
        drafting = [request for request in everyone if request.counts.may_draft]
        if self.budget.groups == 1:
            places = (min((groups[request] for request in drafting if request in groups), default=0),) * len(drafting)
        else:
            lengths = [request.length if request in groups or request in joining else 0 for request in drafting]
            reaches = map(self.budget.reach, drafting)
            rows = [Row(*row) for row in zip(lengths, reaches, map(groups.get, drafting), strict=True)]
            places = arrange(rows, self.reads, self.budget.size, self.budget.nbytes)
        return everyone | dict(zip(drafting, places, strict=True))

    def touched(self, places: Mapping[RequestState, int], joining: Batch | None = None) -> list[Batch]:
        """Return the groups that rows will leave or enter."""
        numbers = {places[request] for request in joining.requests} if joining is not None else set()
        for number, batch in self._groups.items():
            for request in batch.requests:
                if places[request] != number:
                    numbers |= {number, places[request]}
        return [batch for number, batch in self._groups.items() if number in numbers]

    def arrange(self, places: Mapping[RequestState, int], joining: Batch | None = None) -> None:
        """Move rows to their groups and add those of a joining batch. None of them may have a round in progress."""
        parts = [part for number, batch in self._groups.items() for part in _parted(batch, places, number)]
        if joining is not None:
            parts += _parted(joining, places, -1)
        groups: dict[int, Batch] = {}
        for number, part in sorted(parts, key=lambda part: (part[0], part[1] is not self._groups.get(part[0]))):
            if number in groups:
                groups[number].append(part)
            else:
                groups[number] = part
        self._groups = groups
        self._check_at = self._rounds + 1  # from there, other moves may pay

    def drop(self, batch: Batch) -> None:
        self._groups = {number: other for number, other in self._groups.items() if other is not batch}


def _parted(batch: Batch, places: Mapping[RequestState, int], number: int) -> list[tuple[int, Batch]]:
    """Split a batch by its rows' new groups. Rows that stay in group `number` are not copied."""
    wanted = [places[request] for request in batch.requests]
    stays = number if number in wanted else wanted[0]
    moving = [row for row, group in enumerate(wanted) if group != stays]
    return [(stays, batch), *([(wanted[moving[0]], batch.take(moving))] if moving else [])]
