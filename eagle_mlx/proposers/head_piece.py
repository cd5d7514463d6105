"""What a head's cache holds of some positions of a text, some of which it may never have read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from eagle_mlx.cache.ragged import KVPiece


@dataclass(frozen=True)
class Gap:
    """Positions that a cache leaves out."""

    slot: int
    """The entry that they would stand in front of."""
    count: int


@dataclass(frozen=True)
class HeadPiece:
    """The entries of some positions."""

    entries: KVPiece
    gaps: list[Gap]
    """By the first of these entries."""
    length: int
    """Positions, those that are left out included."""

    @property
    def slots(self) -> int:
        return slots_before(self.gaps, self.length)

    @property
    def arrays(self) -> list[mx.array]:
        return self.entries.arrays

    def split(self, at: int) -> tuple[HeadPiece, HeadPiece]:
        first, second = self.entries.split(slots_before(self.gaps, at))
        return (
            HeadPiece(first, gaps_between(self.gaps, 0, at), at),
            HeadPiece(second, gaps_between(self.gaps, at, self.length), self.length - at),
        )


def joined_gaps(pieces: Sequence[HeadPiece], length: int) -> list[Gap]:
    """What the first `length` positions of these, one behind the other, leave out."""
    slots, gaps = 0, list[Gap]()
    for piece in pieces:
        gaps += [Gap(slots + gap.slot, gap.count) for gap in piece.gaps]
        slots += piece.slots
    return gaps_between(gaps, 0, length)


def slots_before(gaps: Sequence[Gap], length: int) -> int:
    """Entries that the first `length` positions of a text have."""
    return length - sum(gap.count for gap in gaps_between(gaps, 0, length))


def gaps_between(gaps: Sequence[Gap], start: int, end: int) -> list[Gap]:
    """What of the gaps lies in the positions `start` to `end` of a text, by the first entry that these have."""
    before, found, left_out = 0, list[Gap](), 0
    for gap in gaps:
        first = gap.slot + left_out  # of the positions left out
        last, left_out = first + gap.count, left_out + gap.count
        before += max(0, min(last, start) - first)
        if (count := min(last, end) - max(first, start)) > 0:
            found.append(Gap(gap.slot - (start - before), count))
    return found
