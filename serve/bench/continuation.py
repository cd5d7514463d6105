"""What a mode decoded for one prompt, and how much of it was drafted."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True)
class Continuation:
    """What one prompt got, with the end-of-turn token where one was emitted."""

    tokens: tuple[int, ...]
    text: str
    rounds: int
    """Target forwards that emitted tokens."""
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()


Decoding = Generator[int, None, list[Continuation]]
"""Yields after every step how many tokens it gave; returns the continuation of each prompt."""


def finish(decoding: Decoding) -> list[Continuation]:
    """Decode to the end."""
    while True:
        try:
            next(decoding)
        except StopIteration as end:
            continuations: list[Continuation] = end.value
            return continuations


def acceptance_length(continuations: Sequence[Continuation]) -> float:
    """τ over all of them: tokens emitted per target forward, bonus tokens included."""
    return sum(len(one.tokens) for one in continuations) / max(1, sum(one.rounds for one in continuations))


def acceptance_by_position(continuations: Sequence[Continuation]) -> list[float]:
    """For each draft position, the share of the rounds that drafted it in which it was accepted."""
    drafted = [sum(column) for column in zip_longest(*(c.drafted_by_position for c in continuations), fillvalue=0)]
    accepted = [sum(column) for column in zip_longest(*(c.accepted_by_position for c in continuations), fillvalue=0)]
    return [hits / count for hits, count in zip_longest(accepted, drafted, fillvalue=0) if count]
