"""The time of a run."""

from __future__ import annotations

import time
from collections.abc import Callable


class Stopwatch:
    """Seconds of a run, those before an interruption included."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """`clock`: seconds since any moment, never less than before."""
        self._clock = clock
        self._begin = clock()

    @property
    def elapsed(self) -> float:
        return self._clock() - self._begin

    def restart(self, elapsed: float = 0.0) -> None:
        """Go on from so many seconds."""
        self._begin = self._clock() - elapsed
