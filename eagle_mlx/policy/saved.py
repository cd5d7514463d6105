"""Numbers that a file held, checked."""

from __future__ import annotations

import math


def positive(value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"{value!r} is not a positive number")
    return float(value)


def share(value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{value!r} is no share")
    return float(value)


def whole(value: float, least: int) -> int:
    if int(value) != value or value < least:
        raise ValueError(f"{value!r} is no whole number of at least {least}")
    return int(value)
