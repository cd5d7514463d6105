"""What `make test` runs of what `make test-full` runs: fewer cases of the same properties.

Every value of every parameter has its turn in `make test`. There MLX compiles kernels only where a test asks for it
(`compiled`), since g++ takes a second for each, and commands try heads on 24 tokens (tests/conftest.py).

`EAGLE_FULL=1 pytest tests/...` runs any test in full.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any, TypeVar

FULL = os.environ.get("EAGLE_FULL") == "1"
T = TypeVar("T")


def in_full(full: T, otherwise: T) -> T:
    """One value for `make test-full`, another for `make test`."""
    return full if FULL else otherwise


def some(count: int) -> int:
    """So many examples of hypothesis; unless in full, two in five of them."""
    return in_full(count, max(4, 2 * count // 5))


def in_turn(values: Iterable[T], turn: int = 0, of: int = 2, full: bool = FULL) -> list[T]:
    """All values; unless in full, every second of them, or every `of`-th, from number `turn` on."""
    return list(values) if full else list(values)[turn::of]


def mixed(*parameters: Iterable[Any], full: bool = FULL) -> list[tuple[Any, ...]]:
    """All combinations of values; unless in full, few in which any two values of two parameters still meet."""
    values = [list(each) for each in parameters]
    every = list(product(*(range(len(each)) for each in values)))
    if not full:
        every = _covering(every)
    return [tuple(each[at] for each, at in zip(values, places, strict=True)) for places in every]


def diagonal(*parameters: Iterable[Any], full: bool = FULL) -> list[tuple[Any, ...]]:
    """All combinations of values; unless in full, as few as there are values of one: each value is met once or more."""
    values = [list(each) for each in parameters]
    if full:
        return list(product(*values))
    return [tuple(each[at % len(each)] for each in values) for at in range(max(map(len, values)))]


def _covering(every: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The greedy choice: always the combination that brings most pairs which have not met."""
    met_by = {places: set(combinations(enumerate(places), 2)) for places in every}
    missing = set[Any]().union(*met_by.values())
    chosen = []
    while missing:
        best = max(every, key=lambda places: len(met_by[places] & missing))
        chosen.append(best)
        missing -= met_by[best]
    return chosen
