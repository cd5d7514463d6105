"""How the commands of this application stop when they are asked to, and how they end."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

from eagle_mlx.errors import EagleError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """The process was asked to end, by Ctrl-C or by SIGTERM."""

    def __init__(self, number: int = signal.SIGINT):
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Stop:
    """Turns SIGINT and SIGTERM into Stopped.

    It is raised where the signal finds the program; in a block of `deferred`, at the next call of `check` instead.
    After the first signal the system's own handling is back, so that a second one ends the process whatever it does.
    """

    def __init__(self) -> None:
        self._deferred = False
        self._number: int | None = None

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self._number is not None

    @contextmanager
    def listening(self) -> Generator[None, None, None]:
        """Take the signals within the block. Only the main thread can; elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Generator[None, None, None]:
        """What is in the block is not torn: a signal waits for `check`."""
        with self._set(True):
            yield

    @contextmanager
    def immediate(self) -> Generator[None, None, None]:
        """What is in the block may be given up at any point, even within a block of `deferred`."""
        with self._set(False):
            self.check()
            yield

    def check(self) -> None:
        """Raise Stopped where a signal has come."""
        if self._number is not None:
            raise Stopped(self._number)

    @contextmanager
    def _set(self, deferred: bool) -> Generator[None, None, None]:
        before, self._deferred = self._deferred, deferred
        try:
            yield
        finally:
            self._deferred = before

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        if not self._deferred:
            raise Stopped(number)


def exit_code(work: Callable[[], None]) -> int:
    """Do a command's work: 0, 2 after an error that the user can fix, 130 or 143 when interrupted."""
    try:
        work()
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as e:
        print("interrupted", file=sys.stderr)
        return e.exit_code if isinstance(e, Stopped) else 130
    return 0
