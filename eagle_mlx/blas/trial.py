"""Time the products of a BLAS: `python trial.py LIBRARIES SECONDS THREADS…` prints JSON.

A process of its own, because kernels are chosen when a library is loaded. It needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import sys
from itertools import product
from time import perf_counter

MANY = 256
ROWS = (1, 2, 4, 8, MANY)  # rows of the inputs: those of verifies, and of a chunk of a prompt
_SIDE, _MATRICES, _OF_MANY = 1024, 28, 4
"""The matrices hold 117 MB together, more than a processor's cache. A chunk is multiplied with four of them."""
_ROW_MAJOR, _NO_TRANSPOSE, _TRANSPOSE = 101, 111, 112  # CBLAS's constants (cblas.h)
_BYTE = 0x3C
"""Four such bytes are the number 0.0115. Pages of zeros would share one page of memory."""


def kernels_of(library: ctypes.CDLL) -> str:
    """Return the processor for which an OpenBLAS chose its kernels; empty for another library."""
    if not hasattr(library, "openblas_get_corename"):
        return ""
    library.openblas_get_corename.restype = ctypes.c_char_p
    return str(library.openblas_get_corename().decode())


def set_threads(library: ctypes.CDLL, count: int) -> None:
    """Set the number of threads of an OpenBLAS or a BLIS."""
    if hasattr(library, "openblas_set_num_threads"):
        library.openblas_set_num_threads(count)
    else:
        library.bli_thread_set_num_threads(ctypes.c_int64(count))


def times(library: ctypes.CDLL, threads: list[int], seconds: float) -> dict[tuple[int, int], float]:
    """Return the least seconds of a pass over all matrices, by threads and rows. Every case runs at least twice."""
    real, pointer, number = ctypes.c_float, ctypes.c_void_p, ctypes.c_int
    sgemm = library.cblas_sgemm
    sgemm.restype = None
    sgemm.argtypes = (*(number,) * 6, real, pointer, number, pointer, number, real, pointer, number)
    memory = (real * (_SIDE * (_SIDE * _MATRICES + 2 * MANY)))()
    ctypes.memset(memory, _BYTE, ctypes.sizeof(memory))
    weights = ctypes.addressof(memory)
    x, y = (weights + 4 * _SIDE * (_SIDE * _MATRICES + MANY * part) for part in range(2))

    def one_pass(rows: int) -> float:
        start, count = perf_counter(), _OF_MANY if rows == MANY else _MATRICES
        for matrix in range(count):
            w = weights + 4 * _SIDE * _SIDE * matrix
            sgemm(
                _ROW_MAJOR, _NO_TRANSPOSE, _TRANSPOSE, rows, _SIDE, _SIDE, 1.0, x, _SIDE, w, _SIDE, 0.0, y, _SIDE
            )  # fmt: skip
        return (perf_counter() - start) * _MATRICES / count

    least: dict[tuple[int, int], float] = {}
    end = perf_counter() + seconds
    while not least or perf_counter() < end:
        for case in product(threads, ROWS):
            set_threads(library, case[0])
            least[case] = min(least.get(case, math.inf), one_pass(case[1]), one_pass(case[1]))
    return least


def load(names: str) -> tuple[str, ctypes.CDLL]:
    """Return the first of the libraries, divided by colons, that this machine has. Raises OSError if it has none."""
    for name in names.split(":"):
        with contextlib.suppress(OSError):
            return name, ctypes.CDLL(name)
    raise OSError(names)


if __name__ == "__main__":
    named, tried = load(sys.argv[1])
    measured = times(tried, [int(count) for count in sys.argv[3:]], float(sys.argv[2]))
    print(json.dumps([named, kernels_of(tried), [[*case, least] for case, least in measured.items()]]))
