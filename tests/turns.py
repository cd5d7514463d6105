"""Turns of xdist's workers: a test that runs ranks may have the whole machine for a while.

MLX's ranks wait for each other without sleeping, several times per token. If another worker's test shares their cores,
each wait lasts as long as the system lets that test run, and a few seconds become half a minute.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.full import FULL

with suppress(ImportError):  # not on Windows
    import fcntl
HERE = Path(__file__).parent
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_IN_USE = _WORKERS > 1 and not FULL and "fcntl" in globals()
# Any two files that all workers can open. Who wants to be alone keeps the first until the others have left the second.
_gate, _room = (os.open(HERE / name, os.O_RDONLY) for name in ("turns.py", "full.py")) if _IN_USE else (-1, -1)


def _enter(how: int) -> None:
    fcntl.flock(_gate, how)
    fcntl.flock(_room, how)
    fcntl.flock(_gate, fcntl.LOCK_UN)


@contextmanager
def in_company() -> Iterator[None]:
    """Run a test while other workers run theirs; first wait until nobody is or wants to be alone."""
    if not _IN_USE:
        yield
        return
    _enter(fcntl.LOCK_SH)
    try:
        yield
    finally:
        fcntl.flock(_room, fcntl.LOCK_UN)


@contextmanager
def alone() -> Iterator[None]:
    """Within a test, wait until the other workers have ended their tests, and keep them from the next ones."""
    if not _IN_USE:
        yield
        return
    fcntl.flock(_room, fcntl.LOCK_UN)
    _enter(fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(_room, fcntl.LOCK_SH)
