"""What is refused of a schema before anything is compiled, because it is known to cost too much."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

MOST_MULTIPLE = 10_000
"""llguidance's automaton has a state for each remainder: 10,007 takes 25 ms, 100,003 meets its limits, 10^6 hangs."""
MOST_REPEATS = 100_000
"""A pattern's repeats within repeats, multiplied: (a{1000}){100} takes 1 s and (a{1000}){1000} does not end."""
_PART = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]?|\(|\)|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)
"""A class needs no end. Otherwise a pattern of nothing but `[` would be scanned to its end for each of them."""


def why_too_complex(schema: Any) -> str | None:
    """Why a schema cannot be compiled in a moment, with the key that is to blame; None where nothing is known."""
    for node in _objects(schema):
        multiple, pattern = node.get("multipleOf"), node.get("pattern")
        if isinstance(multiple, int | float) and _digits(multiple) > MOST_MULTIPLE:
            return f"multipleOf {multiple} is too large; {MOST_MULTIPLE} is the most, powers of ten left out"
        if isinstance(pattern, str) and repeats(pattern) > MOST_REPEATS:
            return f"pattern {pattern[:60]!r} repeats what repeats, over {MOST_REPEATS} times in all; simplify it"
    return None


def repeats(pattern: str) -> int:
    """Return how often the most repeated part of a regular expression is written out, by counts such as {3} and {2,5}.

    Counts stop at one more than `MOST_REPEATS`.
    """
    open_groups, most_in_group, before = [], 1, 1
    most = 1
    for part in _PART.finditer(pattern):
        text = part[0]
        if text == "(":
            open_groups.append(most_in_group)
            most_in_group = before = 1
        elif text == ")":
            before, most_in_group = most_in_group, max(most_in_group, open_groups.pop() if open_groups else 1)
        elif part[1]:
            before = min(before * max(_count(part[1]), _count(part[2] or ""), 1), MOST_REPEATS + 1)
        else:
            before = 1
        most_in_group = max(most_in_group, before)
        most = max(most, most_in_group)
    return most


def _objects(schema: Any) -> Iterator[Mapping[str, Any]]:
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, Mapping):
            yield node
            left += node.values()
        elif isinstance(node, list):
            left += node


def _count(digits: str) -> int:
    """Return a number of repeats, or one that is too many; Python refuses to read numbers of over 4,300 digits."""
    digits = digits.lstrip("0")
    return int(digits or 0) if len(digits) < 10 else MOST_REPEATS + 1


def _digits(number: float) -> int:
    """A number's digits without its point and the zeros at its ends: 0.25 -> 25."""
    return int("".join(map(str, Decimal(str(number)).normalize().as_tuple().digits)))
