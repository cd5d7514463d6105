"""The server's log: lines with time and level on stderr; a line that repeats is counted, and not written each time."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
TIME = "%Y-%m-%dT%H:%M:%S%z"
PERIOD = 60.0
"""Seconds in which a line that repeats is counted, and not written."""
_MOST_LINES = 256
"""Different lines of a period. Beyond them, lines that differ in their details count as the same."""
_Line = tuple[str, int, str, str]


@dataclass
class _Repeats:
    until: float
    """When the period ends, by the handler's clock."""
    count: int = 0


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes a line once, then once a period how often it was repeated."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        super().__init__(stream if stream is not None else sys.stderr)
        self.setFormatter(logging.Formatter(FORMAT, TIME))
        self._clock = clock
        self._lines: dict[_Line, _Repeats] = {}

    def emit(self, record: logging.LogRecord) -> None:
        now = self._clock()
        self._end_periods(now)
        line = self._line(record)
        if line in self._lines:
            self._lines[line].count += 1
            return
        self._lines[line] = _Repeats(now + PERIOD)
        super().emit(record)

    def close(self) -> None:
        """Write the counts that are left."""
        self.acquire()
        try:
            self._end_periods(float("inf"))
        finally:
            self.release()
        super().close()

    def _line(self, record: logging.LogRecord) -> _Line:
        error = record.exc_info[1] if record.exc_info else None
        line = (record.name, record.levelno, record.getMessage(), "" if error is None else repr(error)[:200])
        if len(self._lines) < _MOST_LINES or line in self._lines:
            return line
        return record.name, record.levelno, str(record.msg), ""

    def _end_periods(self, now: float) -> None:
        for line, repeats in list(self._lines.items()):
            if now < repeats.until:
                continue
            del self._lines[line]
            if repeats.count:
                name, level, text, error = line
                said = f"{text}{f' ({error})' if error else ''}; repeated {repeats.count} times in {PERIOD:.0f} s"
                super().emit(logging.LogRecord(name, level, "", 0, said, None, None))
                self._lines[line] = _Repeats(now + PERIOD)


def set_up() -> None:
    """Write the log of this process to stderr: warnings of all libraries, and what the server says of itself."""
    logging.basicConfig(handlers=[LogHandler()], level=logging.WARNING)
    logging.getLogger("eagle_mlx").setLevel(logging.INFO)
