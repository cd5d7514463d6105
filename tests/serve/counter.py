"""An object for the processes of test_processes.py. They import only this file, by its path."""

from __future__ import annotations

import os
import signal


class Counter:
    """Adds numbers, and can stop its own process."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, more: int) -> int:
        self.count += more
        return self.count

    def process(self) -> int:
        return os.getpid()

    def pause(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
