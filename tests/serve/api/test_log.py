"""The log has times and levels, one line per refusal, and counts repeats."""

from __future__ import annotations

import io
import logging
import re

from eagle_mlx.serve.api.log import PERIOD, LogHandler

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} (DEBUG|INFO|WARNING|ERROR) [\w.]+: .+")


class Log:
    """A logger whose handler uses this object's clock."""

    def __init__(self) -> None:
        self.now, self._stream = 0.0, io.StringIO()
        self.handler = LogHandler(self._stream, lambda: self.now)
        self.logger = logging.Logger("eagle_mlx.test")
        self.logger.addHandler(self.handler)

    @property
    def written(self) -> str:
        return self._stream.getvalue()

    @property
    def lines(self) -> list[str]:
        """Return the lines since the last call, without times."""
        written = self.written.splitlines()
        self._stream.truncate(0)
        self._stream.seek(0)
        assert all(LINE.fullmatch(line) for line in written), written
        return [line.split(" ", 1)[1] for line in written]


def test_20_repeats_of_a_line_are_counted_once_a_minute() -> None:
    log = Log()
    for _ in range(3):
        log.logger.warning("no room for %s", "a")
    log.logger.warning("no room for %s", "b")
    assert log.lines == ["WARNING eagle_mlx.test: no room for a", "WARNING eagle_mlx.test: no room for b"]
    for minute in range(1, 3):
        log.now = minute * PERIOD
        log.logger.warning("no room for %s", "a")
        assert log.lines == [f"WARNING eagle_mlx.test: no room for a; repeated {3 - minute} times in 60 s"]
    log.now = 3 * PERIOD
    log.logger.info("100 %")
    assert log.lines == [
        "WARNING eagle_mlx.test: no room for a; repeated 1 times in 60 s",
        "INFO eagle_mlx.test: 100 %",
    ]
    log.now = 5 * PERIOD
    log.logger.warning("no room for %s", "a")
    log.logger.warning("no room for %s", "a")
    assert log.lines == ["WARNING eagle_mlx.test: no room for a"]


def test_20_the_number_of_different_lines_is_bounded() -> None:
    log = Log()
    for number in range(10_000):
        log.logger.warning("refused %d", number)
    assert len(log.lines) < 300


def test_20_the_same_message_with_another_error_is_a_new_line() -> None:
    log = Log()
    for error in (ValueError("a"), ValueError("b"), ValueError("b")):
        log.logger.error("it failed", exc_info=error)
    assert log.written.count("it failed") == 2
