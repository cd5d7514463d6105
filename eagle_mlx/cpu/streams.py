"""Using all cores of a CPU: parts of a batch side by side, each on an MLX stream of its own."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterator

import mlx.core as mx

from eagle_mlx.cpu import blas
from eagle_mlx.cpu.flag import use_shortcuts

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


@contextlib.contextmanager
def one_blas_thread(wanted: bool) -> Iterator[None]:
    """OpenBLAS on one thread within the block, as streams side by side want it; nothing happens with another BLAS."""
    before = blas_threads()
    if wanted:
        set_blas_threads(1)
    try:
        yield
    finally:
        set_blas_threads(before)


def blas_threads() -> int:
    """Threads of OpenBLAS; 0 with another BLAS. A product's last bits depend on them."""
    openblas = _openblas()
    return int(openblas.openblas_get_num_threads()) if openblas else 0


def set_blas_threads(count: int) -> None:
    """Set what `blas_threads` tells."""
    openblas = _openblas()
    if openblas and count:
        openblas.openblas_set_num_threads(count)


@functools.cache
def _openblas() -> ctypes.CDLL | None:
    library = blas.activate()
    return ctypes.CDLL(library.path) if library.kind == "openblas" else None


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
