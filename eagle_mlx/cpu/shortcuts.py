"""Whether a CPU takes ways of its own, and how it uses all its cores: parts of a batch each on an MLX stream."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

import mlx.core as mx

from eagle_mlx.errors import ConfigError

ENVIRONMENT = "EAGLE_MLX_CPU_SHORTCUTS"


def _wish(said: str) -> bool:
    if said not in ("", "0", "1"):
        raise ConfigError(f"{ENVIRONMENT} is {said!r}; set it to 0 to compute on a CPU as on a GPU, or leave it out")
    return said != "0"


_wanted = _wish(os.environ.get(ENVIRONMENT, ""))


def use_shortcuts() -> bool:
    """Whether to compute in the ways that are faster on a CPU: there, unless they are switched off."""
    return _wanted and mx.default_device() == mx.Device(mx.cpu)


@contextlib.contextmanager
def without_shortcuts() -> Iterator[None]:
    """Compute as on a GPU within the block, in all threads."""
    global _wanted
    before, _wanted = _wanted, False
    try:
        yield
    finally:
        _wanted = before


# MLX runs an elementwise operation on one thread, and half of a small head's step is elementwise. Two streams within
# one `mx.eval` keep two cores busy; two evaluations after each other (`mx.async_eval`) do not.

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def default_streams() -> int:
    """One stream per core on a CPU under Linux, where the BLAS can be told to keep to one thread; else one."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" and use_shortcuts() else 1


def make_streams(count: int) -> list[mx.Stream]:
    """So many streams; a single one is the default stream."""
    device = mx.default_device()
    return [mx.default_stream(device)] if count == 1 else [mx.new_stream(device) for _ in range(count)]


def tune_process() -> None:
    """Settings of the whole process for long work on a CPU under Linux; to be called before MLX evaluates anything.

    glibc keeps freed memory, since large buffers come and go every step and fresh pages cost a quarter of it. MLX walks
    graphs in width, so that the operations of all streams are queued in turn: without that the second stream waits for
    most of the first.
    """
    if sys.platform != "linux" or not use_shortcuts():
        return
    os.environ.setdefault("MLX_BFS_MAX_WIDTH", "200")
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1)):
            mallopt(option, value)
