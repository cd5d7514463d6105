"""Which rows are decoded together: all of them, or the long ones apart from the short ones.

The rows of a batch take, and a round of theirs reads, as much room as the longest. Two groups of like length read less
of keys and values, and the weights once more. What is decided follows from shapes and lengths alone, never from time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from eagle_mlx.cache.ragged import CacheSize
from eagle_mlx.proposers.base import HasModel, Proposer
from eagle_mlx.target import Target

GROUPS = 2
"""Groups that there are at most: a third would read the weights a third time, for less padding than the second saves.
"""
_ROUND = 32 << 20
"""Bytes in whose time a round begins and ends, whatever it reads: twice what was measured on a CPU (docs/decisions.md).

It keeps small models from a second round that costs more than it saves; of a model of a gigabyte it is 3 %.
"""
_PAID_BACK = 64
"""Rounds within which what is copied must be saved: most answers have more."""

Places = tuple[int, ...]
"""The group of each row, 0 or 1."""


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


def split(lengths: Sequence[int]) -> Places:
    """The two groups in which the rows have the least padding: the longest are in group 1.

    One group where another would save nothing.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    longest = max(lengths, default=0)
    most, count = 0, 0
    for rows, (_, following) in enumerate(pairwise(order), 1):
        saved = (len(order) - rows) * (longest - lengths[following])
        if saved > most:
            most, count = saved, rows
    long = set(order[:count])
    return tuple(int(row in long) for row in range(len(lengths)))


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


def by_reach(reaches: Sequence[int], size: CacheSize, allowed: int) -> Places:
    """One group where it fits, whatever the rows come to; else the two that take least."""
    together = size.nbytes(len(reaches), max(reaches, default=0))
    return (0,) * len(reaches) if together <= allowed else split(reaches)


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
