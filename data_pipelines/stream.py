"""Sources that are read once from end to end and never stored, in an order that depends on the seed alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TypeVar

T = TypeVar("T")

BLOCK = 10_000
"""Rows that are held at once to be shuffled."""


def shuffled(parts: Sequence[Callable[[], Iterable[T]]], seed: int | None, block: int = BLOCK) -> Iterator[T]:
    """Every row of every part once: the parts in an order drawn by the seed, then shuffled block by block.

    A block is filled, permuted by (seed, its number), emptied, and only then comes the next one. So the row at any
    place is a function of the seed and the data, and whoever starts again meets the same rows in the same order: none
    is lost or met twice, as happens with a buffer whose contents are forgotten. None keeps the parts' own order.
    """
    if seed is None:
        yield from chain.from_iterable(part() for part in parts)
        return
    order = random.Random(f"{seed}/parts").sample(range(len(parts)), len(parts))
    rows = chain.from_iterable(parts[number]() for number in order)
    number = 0
    while held := list(islice(rows, block)):
        random.Random(f"{seed}/{number}").shuffle(held)
        yield from held
        number += 1
