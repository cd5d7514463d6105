"""Notices that acceptance falls below its own past (Page 1954, CUSUM)."""

from __future__ import annotations

import math

_REFERENCE = 50
"""Requests whose mean and deviation are the past."""
_SLACK, _LIMIT = 0.75, 8.0
"""In standard deviations. Simulated: a fall of one is noticed after 22 requests (90 % of falls after 54), and of 80,000
requests that stayed the same, one raised an alarm."""


class DriftDetector:
    """A one-sided cumulative sum over values, such as tokens per target forward of each request."""

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._count, self._mean = 0, 0.0
        self._squares, self._sum = 0.0, 0.0

    def falls(self, value: float) -> bool:
        """Add a value; return whether the values have fallen. Then the next ones are the new past."""
        if self._count < _REFERENCE:  # Welford's mean and squares
            self._count += 1
            difference = value - self._mean
            self._mean += difference / self._count
            self._squares += difference * (value - self._mean)
            return False
        deviation = max(math.sqrt(self._squares / self._count), 1e-6)
        self._sum = max(0.0, self._sum + (self._mean - value) / deviation - _SLACK)
        if self._sum <= _LIMIT:
            return False
        self._restart()
        return True
