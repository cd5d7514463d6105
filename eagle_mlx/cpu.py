"""Code for the CPU only: exponentials, RoPE angles shared by all layers, streams for the parts of a batch, and memory.

Code with a CPU version and a GPU version calls `use_shortcuts()` to choose. `EAGLE_MLX_CPU_SHORTCUTS=0` turns the CPU
versions off, so that a machine without a GPU can test the GPU's code path. It does not affect the BLAS.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.errors import ConfigError

ENVIRONMENT = "EAGLE_MLX_CPU_SHORTCUTS"

_value = os.environ.get(ENVIRONMENT, "")
if _value not in ("", "0", "1"):
    raise ConfigError(f"{ENVIRONMENT} is {_value!r}; set it to 0 to compute on a CPU as on a GPU, or unset it")
switched_on = _value != "0"
_KERNELS = 2**20  # bytes for about fifty of the libraries that MLX compiles, of up to 20 KB


def _can_compile(place: str) -> bool:
    """Return whether MLX can write the kernels that it compiles for a CPU to a folder, and load them from there."""
    if not os.access(place, os.W_OK | os.X_OK):
        return False
    system = os.statvfs(place)
    return system.f_bavail * system.f_frsize >= _KERNELS and not system.f_flag & os.ST_NOEXEC


_temporary = next(filter(None, map(os.environ.get, ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))), "/tmp")  # as in C++
if sys.platform == "linux" and mx.default_device() == mx.Device(mx.cpu) and not _can_compile(_temporary):
    mx.disable_compile()  # otherwise every forward would raise


def use_shortcuts() -> bool:
    """Return whether to use the versions that are faster on a CPU: on a CPU, unless they are turned off."""
    return switched_on and mx.default_device() == mx.Device(mx.cpu)


def compute_dtype() -> mx.Dtype | None:
    """Return the dtype to compute in if the files' own would be slow, else None."""
    return mx.float32 if sys.platform == "linux" and use_shortcuts() else None


# On two cores, [2048, 768] float32, in ns per element: exp 8.5, softmax 9.1; power(e, x) 2.9, a sum or product 0.1 to
# 0.4. We use these forms in losses and in a prompt's tiles of attention, where they gain at least 5 % of the whole
# (benchmarks/results/cpu-shortcuts.yaml), and on the CPU only, because a GPU fuses MLX's own better.


def softmax(x: mx.array) -> mx.array:
    """Return the softmax over the last axis."""
    if not use_shortcuts():
        return mx.softmax(x, axis=-1)
    e = _exp(x - mx.stop_gradient(mx.max(x, axis=-1, keepdims=True)))
    return e * mx.reciprocal(mx.sum(e, axis=-1, keepdims=True))


def log_sum_exp(x: mx.array) -> mx.array:
    """Return the log-sum-exp over the last axis, which is kept with length 1."""
    if not use_shortcuts():
        return mx.logsumexp(x, axis=-1, keepdims=True)
    top = mx.stop_gradient(mx.max(x, axis=-1, keepdims=True))
    return top + mx.log(mx.sum(_exp(x - top), axis=-1, keepdims=True))


def _exp(x: mx.array) -> mx.array:
    """Return e**x, up to float32 rounding of the exponent."""
    return mx.power(mx.array(math.e, x.dtype), x)


_LEAST_TABLE = 512  # positions of the smallest table of angles, which is computed in a millisecond


class SharedAngles:
    """The angles of one forward's positions, for all layers whose RoPE rotates halves of a vector alike.

    On a CPU, RoPE is about twenty operations in every layer. The angles of positions 0, 1, … are kept in `tables`.
    """

    def __init__(self, tables: dict[Any, list[mx.array]]):
        self._tables = tables
        self._cos_sin: dict[Any, tuple[mx.array, mx.array, Any]] = {}

    def rotated(self, rope: nn.Module, plain: Any, x: mx.array, offset: Any) -> mx.array | None:
        """Return x [B, H, L, D] rotated as by `plain(x, offset)`, bit for bit; None for other kinds of RoPE.

        offset: an int or [B] int32.
        """
        if not isinstance(rope, nn.RoPE) or rope.traditional or x.dtype != mx.float32:
            return None
        half = x.shape[-1] // 2
        if x.ndim != 4 or rope.dims != 2 * half or (isinstance(offset, mx.array) and not offset.ndim):
            return None
        kind, count = (rope.base, rope.scale, half), x.shape[2]
        key = *kind, count, offset if isinstance(offset, int) else id(offset)
        if key not in self._cos_sin:
            if isinstance(offset, int):
                cos, sin = (
                    angles[:, :, offset : offset + count] for angles in self._table(kind, plain, offset + count)
                )
            else:
                cos, sin = _angles(plain, (offset.shape[0], 1, count, 2 * half), offset)
            self._cos_sin[key] = cos, sin, offset
        cos, sin, _ = self._cos_sin[key]
        return x * cos + mx.concatenate([x[..., half:], x[..., :half]], -1) * sin

    def _table(self, kind: tuple[float, float, int], plain: Any, end: int) -> list[mx.array]:
        """Return the angles of the first positions, at least `end` of them."""
        table = self._tables.get(kind)
        if table is None or table[0].shape[2] < end:
            size = max(_LEAST_TABLE, 1 << (end - 1).bit_length())
            table = self._tables[kind] = _angles(plain, (1, 1, size, 2 * kind[2]), 0)
            mx.eval(table)  # another thread may use it next
        return table


def _angles(plain: Any, shape: tuple[int, ...], offset: int | mx.array) -> list[mx.array]:
    """Return (cos, cos) and (-sin, sin) of the positions from `offset` on, each with this shape [B, 1, L, D]."""
    unit = (mx.arange(shape[-1]) < shape[-1] // 2).astype(mx.float32)  # its image under a rotation is (cos, sin)
    cos, sin = mx.split(plain(mx.broadcast_to(unit, shape), offset), 2, axis=-1)
    return [mx.concatenate([cos, cos], -1), mx.concatenate([-sin, sin], -1)]


# MLX runs an elementwise operation on one thread, and half of a small head's step is elementwise. Two streams in one
# `mx.eval` keep two cores busy; two consecutive `mx.async_eval` do not.


def default_streams() -> int:
    """Return one stream per core on a CPU under Linux, where the BLAS can be limited to one thread; else one."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" and use_shortcuts() else 1


def make_streams(count: int) -> list[mx.Stream]:
    """Return `count` streams; if it is one, the default stream."""
    device = mx.default_device()
    return [mx.default_stream(device)] if count == 1 else [mx.new_stream(device) for _ in range(count)]


_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # glibc, malloc.h


def tune_process() -> None:
    """Tune the whole process for training on a CPU under Linux; call this before MLX evaluates anything.

    glibc keeps the large buffers that a step frees: the kernel zeroes fresh pages, which took a quarter of the time.
    MLX walks graphs breadth-first: operations go to all streams in turn, and no stream waits for another.
    """
    if sys.platform != "linux" or not use_shortcuts():
        return
    os.environ.setdefault("MLX_BFS_MAX_WIDTH", "200")
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((_TRIM_THRESHOLD, 2**31 - 1), (_MMAP_MAX, 0), (_ARENA_MAX, 1)):
            mallopt(option, value)
