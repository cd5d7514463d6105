"""What a run is planned for: how much memory its arrays may take, whether MLX computes on a GPU, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from eagle_mlx.memory import free_memory
from eagle_mlx.target import compute_dtype

_SMALLEST, _LARGEST = 512, 8192
"""Sizes of the products that are timed: from one that the slowest CPU does in 0.1 s, to one that takes 0.8 GB."""
_READ = 4096
"""Size of the matrix that is read: 67 MB, more than caches hold."""
_ENOUGH = 0.05
"""Seconds from which the 0.1 to 0.5 ms in which a GPU is given its work are nothing."""


@dataclass(frozen=True)
class Machine:
    memory: int
    """Bytes that a run may take."""
    gpu: bool
    floats: int | None = None
    """Bytes of a number that the target computes where the machine decides; None for those of its files."""

    @classmethod
    def here(cls) -> Machine:
        """This one, as it is now; of a Mac's memory what Metal recommends to use (`eagle_mlx.memory.device_memory`)."""
        dtype = compute_dtype()
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        return cls(free_memory(), on_gpu, None if dtype is None else dtype.size)

    @property
    def device(self) -> mx.Device:
        return mx.Device(mx.gpu if self.gpu else mx.cpu)


def work_per_second(dtype: mx.Dtype = mx.float32, seconds: Callable[[int], float] | None = None) -> float:
    """Operations a second in products of square matrices of a type, on the default device.

    The matrices grow until a product takes long enough; the best of three counts. `seconds` times one of a size.
    """
    timed = seconds or (lambda size: _seconds(size, dtype))
    size = _SMALLEST
    while (found := timed(size)) < _ENOUGH and size < _LARGEST:
        size *= 2
    return float(2 * size**3 / min(found, timed(size), timed(size)))


def bytes_per_second(seconds: Callable[[int], float] | None = None) -> float:
    """Bytes a second that a product of a float32 matrix with one vector reads, on the default device; the best of
    three. `seconds` times one of a size."""
    timed = seconds or _seconds_to_read
    return 4 * _READ**2 / min(timed(_READ) for _ in range(3))


def _seconds_to_read(size: int) -> float:
    matrix, vector = mx.ones((size, size)), mx.ones((1, size))
    mx.eval(matrix, vector, vector @ matrix.T)
    begin = time.perf_counter()
    mx.eval(vector @ matrix.T)
    return time.perf_counter() - begin


def _seconds(size: int, dtype: mx.Dtype) -> float:
    """A product's, after one that is not timed: the first of a size compiles and allocates."""
    a = mx.random.normal((size, size), key=mx.random.key(0)).astype(dtype)
    mx.eval(a @ a)
    begin = time.perf_counter()
    mx.eval(a @ a)
    return time.perf_counter() - begin
