"""The server's log: lines with times and levels on stderr, and counts in place of endless repeats."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from math import inf
from typing import TextIO

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_TIME = "%Y-%m-%dT%H:%M:%S%z"
PERIOD = 60.0
"""Seconds in which repeats of a line are counted instead of written."""
_MOST_LINES = 256
"""Maximum distinct lines per period. Beyond it, lines that differ only in details count as the same."""
_Line = tuple[str, int, str, str]


def set_up_log() -> None:
    """Log to stderr: warnings of all libraries, and this server's messages from INFO up."""
    logging.basicConfig(handlers=[LogHandler()], level=logging.WARNING)
    logging.getLogger("eagle_mlx").setLevel(logging.INFO)


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes a line once, and then, once per period, how often it was repeated."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        super().__init__(stream if stream is not None else sys.stderr)
        self.setFormatter(logging.Formatter(_FORMAT, _TIME))
        self._clock = clock
        self._until: dict[_Line, float] = {}
        """When each line's period ends, by the handler's clock."""
        self._repeats: Counter[_Line] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        now = self._clock()
        self._end_periods(now)
        error = record.exc_info[1] if record.exc_info else None
        line = (record.name, record.levelno, record.getMessage(), "" if error is None else repr(error)[:200])
        if len(self._until) >= _MOST_LINES and line not in self._until:
            line = (record.name, record.levelno, str(record.msg), "")
        if line in self._until:
            self._repeats[line] += 1
        else:
            self._until[line] = now + PERIOD
            super().emit(record)

    def close(self) -> None:
        self._end_periods(inf)
        super().close()

    def _end_periods(self, now: float) -> None:
        for line in [line for line, until in self._until.items() if until <= now]:
            del self._until[line]
            if count := self._repeats.pop(line, 0):
                name, level, text, error = line
                said = f"{text}{f' ({error})' if error else ''}; repeated {count} times in {PERIOD:.0f} s"
                super().emit(logging.LogRecord(name, level, "", 0, said, None, None))
                self._until[line] = now + PERIOD
