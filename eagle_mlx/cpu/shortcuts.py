"""Whether to use CPU versions of computations, and how to use all cores: one MLX stream for each part of a batch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

import mlx.core as mx

from eagle_mlx.errors import ConfigError

ENVIRONMENT = "EAGLE_MLX_CPU_SHORTCUTS"


_value = os.environ.get(ENVIRONMENT, "")
if _value not in ("", "0", "1"):
    raise ConfigError(f"{ENVIRONMENT} is {_value!r}; set it to 0 to compute on a CPU as on a GPU, or unset it")
_wanted = _value != "0"


def use_shortcuts() -> bool:
    """Return whether to use the versions that are faster on a CPU: on a CPU, unless they are turned off."""
    return _wanted and mx.default_device() == mx.Device(mx.cpu)


@contextlib.contextmanager
def without_shortcuts() -> Iterator[None]:
    """Use the GPU's versions within the block, in all threads."""
    global _wanted
    before, _wanted = _wanted, False
    try:
        yield
    finally:
        _wanted = before


# MLX runs an elementwise operation on one thread, and half of a small head's step is elementwise. Two streams in one
# `mx.eval` keep two cores busy; two consecutive `mx.async_eval` do not.

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def default_streams() -> int:
    """Return one stream per core on a CPU under Linux, where the BLAS can be limited to one thread; else one."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" and use_shortcuts() else 1


def make_streams(count: int) -> list[mx.Stream]:
    """Return `count` streams; if it is one, the default stream."""
    device = mx.default_device()
    return [mx.default_stream(device)] if count == 1 else [mx.new_stream(device) for _ in range(count)]


def tune_process() -> None:
    """Tune the whole process for long work on a CPU under Linux; call this before MLX evaluates anything.

    glibc keeps freed memory: every step allocates large buffers, and fresh pages would take a quarter of the time. MLX
    walks graphs breadth-first, so that operations go to all streams in turn and no stream waits for another.
    """
    if sys.platform != "linux" or not use_shortcuts():
        return
    os.environ.setdefault("MLX_BFS_MAX_WIDTH", "200")
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1)):
            mallopt(option, value)
