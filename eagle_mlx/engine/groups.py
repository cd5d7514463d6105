"""Groups of rows: all rows decode together, or the long ones in a batch of their own that takes turns with the others.

The rows of a batch take, and a round of theirs reads, as much room as the longest. Two groups of like length read less
of keys and values, and the weights twice. Bytes decide, which follow from shapes and lengths alone, never from time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eagle_mlx.cache.ragged import CacheSize
from eagle_mlx.decoding.masks import PATIENCE
from eagle_mlx.engine.batch import Batch
from eagle_mlx.engine.kv_budget import GROUPS, KVBudget, Places, by_reach, split
from eagle_mlx.proposers.base import HasModel, Proposer
from eagle_mlx.request_state import RequestState
from eagle_mlx.target import Target

_LOOK = 16
"""Rounds between two looks at whether rows have outgrown their group: 0.4 ms for 64 rows, on a CPU."""
_ROUND = 32 << 20
"""Bytes in whose time a round begins and ends, whatever it reads: twice what was measured on a CPU (docs/decisions.md).

It keeps small models from a second round that costs more than it saves; of a model of a gigabyte it is 3 %.
"""
_PAID_BACK = 64
"""Rounds within which what is copied must be saved: most answers have more."""


@dataclass(frozen=True)
class RoundReads:
    """Bytes that a round reads: so many whatever its rows, and so many for each of its rows and longest positions."""

    fixed: int
    position: int
    """Of full attention, and of the proposer; what sees a window, or keeps a state, does not grow."""

    @classmethod
    def of(cls, target: Target, proposer: Proposer | None, size: CacheSize) -> RoundReads:
        """`size`: of the caches of both."""
        drafts = proposer.weight_bytes if isinstance(proposer, HasModel) else 0
        return cls(target.weight_bytes + drafts + _ROUND, size.position)


@dataclass(frozen=True)
class Row:
    """What a row has come to, and where it is."""

    length: int
    """Positions in the caches; 0 while its prompt is being read, for rounds read nothing of it."""
    reach: int
    """Positions that are set aside for it."""
    group: int | None = None
    """None where it is in none yet."""


def arrange(rows: Sequence[Row], reads: RoundReads, size: CacheSize, allowed: int) -> Places:
    """The groups in which a round of all rows reads least, what must be copied to get there included.

    Memory comes first: where one group may come to take more bytes than are `allowed`, rows are together as
    `by_reach` has them, or in groups that take no more.
    """
    lengths, wanted = [row.length for row in rows], by_reach([row.reach for row in rows], size, allowed)
    stay = {row.group for row in rows if row.group is not None}
    padding = sum(max(lengths, default=0) - length for length in lengths if length)
    if len(stay) < 2 and not any(wanted) and padding * reads.position <= reads.fixed:
        return (min(stay, default=0),) * len(rows)
    most = _taken(wanted, rows, size)
    found = [tuple(group if row.group is None else row.group for row in rows) for group in (0, 1)]
    for places in ((0,) * len(rows), split(lengths), wanted):
        found += [places, tuple(1 - group for group in places)]
    possible = [places for places in found if _taken(places, rows, size) <= most]
    return min(possible, key=lambda places: _price(places, rows, reads))  # of equals the first, which moves nobody


def _taken(places: Places, rows: Sequence[Row], size: CacheSize) -> int:
    """Bytes that the rows may come to take in these groups."""
    reaches = [[row.reach for row, group in zip(rows, places, strict=True) if group == at] for at in range(GROUPS)]
    return sum(size.nbytes(len(group), max(group, default=0)) for group in reaches)


def _price(places: Places, rows: Sequence[Row], reads: RoundReads) -> float:
    """Bytes that a round of each group reads, and what it takes of the copies that it is to pay for."""
    both = list(zip(rows, places, strict=True))
    lengths = [[row.length for row, group in both if group == at and row.length] for at in range(GROUPS)]
    read = sum(reads.fixed + len(group) * max(group) * reads.position for group in lengths if group)
    moved = sum(row.length for row, to in both if row.group not in (None, to))
    return read + 2 * moved * reads.position / _PAID_BACK  # a copy reads and writes


class Groups:
    """Who is in which group, whose turn it is, and the moves between them.

    A group keeps its number, 0 or 1, as long as it has rows. Which rows are in one is a matter of what a round reads
    and of what memory allows (`arrange`).
    """

    def __init__(self, reads: RoundReads, budget: KVBudget):
        self.reads, self.budget = reads, budget
        self._served = self._rounds = 0
        """The number of the group that had the last round, and how many there were."""
        self._settled: list[tuple[RequestState, int]] | None = None
        """Who was where when all were found to be where they belong."""
        self._slots: list[Batch | None] = [None] * GROUPS

    def weigh(self, reads: RoundReads) -> None:
        """Have rows part or join by other costs from now on."""
        self.reads, self._settled = reads, None

    @property
    def batches(self) -> list[Batch]:
        return [batch for batch in self._slots if batch is not None]

    @property
    def requests(self) -> list[RequestState]:
        return [request for batch in self.batches for request in batch.requests]

    @property
    def decoding(self) -> list[list[RequestState]]:
        """The requests of each group."""
        return [batch.requests for batch in self.batches]

    def number(self, batch: Batch) -> int:
        return self._slots.index(batch)

    def holding(self, request: RequestState) -> Batch | None:
        """The group that a request is in."""
        return next((batch for batch in self.batches if request in batch.requests), None)

    def following(self, batch: Batch) -> Batch:
        """Whose turn it is behind a round of this group: the other's, where there is one."""
        return next((other for other in self.batches if other is not batch), batch)

    def in_turn(self) -> list[Batch]:
        """The groups, the one that had the last round behind the other."""
        return [batch for _, batch in sorted(self._numbered(), key=lambda slot: slot[0] == self._served)]

    def ready(self) -> Batch | None:
        """The first in turn of which a round gives anything. Late masks are waited for where no group is without."""
        turn = self.in_turn()
        seconds = [PATIENCE] if len(turn) == 1 else [0.0, PATIENCE]
        return next((batch for patience in seconds for batch in turn if batch.may_decode(patience)), None)

    def serve(self, batch: Batch) -> None:
        """A group has had a round."""
        self._served, self._rounds = self.number(batch), self._rounds + 1

    def moves(self, prefilling: Sequence[RequestState], joining: Batch | None = None) -> dict[RequestState, int] | None:
        """The group that each request is to be in, if some are not there yet; those being read have places too.

        Looked for where somebody has come or gone, and every so many rounds, for rows grow slowly.
        """
        groups = {request: number for number, batch in self._numbered() for request in batch.requests}
        present = [*groups.items(), *((request, -1) for request in prefilling)]
        if joining is None and present == self._settled and self._rounds % _LOOK:
            return None
        places = self._places(groups, prefilling, joining.requests if joining is not None else ())
        moving = joining is not None or any(places[request] != number for request, number in groups.items())
        self._settled = None if moving else present
        return places if moving else None

    def _places(
        self, groups: Mapping[RequestState, int], prefilling: Sequence[RequestState], joining: Sequence[RequestState]
    ) -> dict[RequestState, int]:
        asked = list(dict.fromkeys([*groups, *prefilling]))
        if self.budget.groups == 1:
            return dict.fromkeys(asked, min(groups.values(), default=0))
        decoding = {*groups, *joining}
        lengths = [request.length if request in decoding else 0 for request in asked]
        reaches = map(self.budget.reach, asked)
        rows = [Row(*row) for row in zip(lengths, reaches, map(groups.get, asked), strict=True)]
        return dict(zip(asked, arrange(rows, self.reads, self.budget.size, self.budget.nbytes), strict=True))

    def touched(self, places: Mapping[RequestState, int], joining: Batch | None = None) -> list[Batch]:
        """The groups that somebody is to leave or to enter."""
        numbers = {places[request] for request in joining.requests} if joining is not None else set()
        for number, batch in self._numbered():
            for request in batch.requests:
                if places[request] != number:
                    numbers |= {number, places[request]}
        return [batch for number, batch in self._numbered() if number in numbers]

    def arrange(self, places: Mapping[RequestState, int], joining: Batch | None = None) -> None:
        """Move rows to their groups, and have those of another batch join. No round of theirs may be under way."""
        parts: list[list[Batch]] = [[] for _ in self._slots]
        for number, batch in enumerate((*self._slots, joining)):
            if batch is not None:
                for group, part in _parted(batch, places, number):
                    parts[group].append(part)
        for stays, entering in zip(self._slots, parts, strict=True):
            entering.sort(key=lambda part: part is not stays)
            for part in entering[1:]:
                entering[0].append(part)
        self._slots = [entering[0] if entering else None for entering in parts]

    def drop(self, batch: Batch) -> None:
        """Forget a group, which has no rows left or has failed."""
        self._slots = [None if other is batch else other for other in self._slots]

    def _numbered(self) -> list[tuple[int, Batch]]:
        return [(number, batch) for number, batch in enumerate(self._slots) if batch is not None]


def _parted(batch: Batch, places: Mapping[RequestState, int], number: int) -> list[tuple[int, Batch]]:
    """A batch by the groups that its rows go to. What stays in the group of this number is not copied."""
    wanted = [places[request] for request in batch.requests]
    stays = number if number in wanted else wanted[0]
    moving = [row for row, group in enumerate(wanted) if group != stays]
    return [(stays, batch), *([(wanted[moving[0]], batch.take(moving))] if moving else [])]
