"""Reduce `make test-full` to `make test`: fewer cases of the same properties.

`make test` uses every value of most parameters (`mixed`, `diagonal`), and some of the others (`in_turn`). In it, MLX
compiles kernels only if a test asks for it (`compiled`), since g++ takes a second for each, and commands try heads on 8
tokens (tests/conftest.py).

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
    """Return the first value in `make test-full`, the other in `make test`."""
    return full if FULL else otherwise


def some(count: int) -> int:
    """Return the number of hypothesis examples: all in full, else a sixth."""
    return in_full(count, max(4, count // 6))


def in_turn(values: Iterable[T], turn: int = 0, of: int = 2, full: bool = FULL) -> list[T]:
    """Return all values in full, else every second or every `of`-th, from number `turn` on."""
    return list(values) if full else list(values)[turn::of]


def mixed(*parameters: Iterable[Any], full: bool = FULL) -> list[tuple[Any, ...]]:
    """Return all combinations of values in full, else a few that cover every pair of values of two parameters."""
    values = [list(parameter) for parameter in parameters]
    every = list(product(*(range(len(choices)) for choices in values)))
    if not full:
        every = _covering(every)
    return [tuple(choices[at] for choices, at in zip(values, places, strict=True)) for places in every]


def diagonal(*parameters: Iterable[Any], full: bool = FULL) -> list[tuple[Any, ...]]:
    """Return all combinations of values in full, else just enough to use each value once."""
    values = [list(parameter) for parameter in parameters]
    if full:
        return list(product(*values))
    return [tuple(choices[at % len(choices)] for choices in values) for at in range(max(map(len, values)))]


def _covering(every: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Choose combinations greedily by the number of new pairs."""
    met_by = {places: set(combinations(enumerate(places), 2)) for places in every}
    missing = set[Any]().union(*met_by.values())
    chosen = []
    while missing:
        best = max(every, key=lambda places: len(met_by[places] & missing))
        chosen.append(best)
        missing -= met_by[best]
    return chosen
