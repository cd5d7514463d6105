"""On Linux, load a fast BLAS before MLX and set its threads: the BLAS in MLX's wheel is about 40 times slower."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

ENVIRONMENT = "EAGLE_MLX_BLAS"
INSTALL_HINT = "apt-get install libopenblas0-pthread (Debian, Ubuntu) or dnf install openblas-threads (Fedora)"
_CANDIDATES = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblas.so")


@dataclass(frozen=True)
class Blas:
    kind: Literal["openblas", "reference", "accelerate", "other"]  # other: a named library, such as MKL
    path: str = ""  # the library's file; empty if MLX brings its own
    kernels: str = ""  # the processor for which OpenBLAS's kernels are made; OPENBLAS_CORETYPE can name another

    def __str__(self) -> str:
        return self.kind + (f" for {self.kernels}" if self.kernels else "") + (f" ({self.path})" if self.path else "")


@functools.cache
def activate() -> Blas:
    """Load OpenBLAS into the global symbol table, once, and return the BLAS that MLX will use.

    This must run before `mlx.core` is imported; `import eagle_mlx` does it. `EAGLE_MLX_BLAS=reference` keeps the BLAS
    in MLX's wheel; `EAGLE_MLX_BLAS=/path/to/lib.so` names a library. A missing library is not an error: after one
    warning, everything runs slowly on the reference BLAS.
    """
    wish = os.environ.get(ENVIRONMENT, "")
    if sys.platform == "darwin":
        return Blas("accelerate")
    if wish == "reference":
        return Blas("reference")
    if "mlx.core" in sys.modules and _provider() is None:
        _warn("mlx was imported before eagle_mlx, too late to give it OpenBLAS; import eagle_mlx first")
        return Blas("reference")
    for name in _CANDIDATES if wish in ("", "openblas") else (wish,):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            if provider := _provider():
                kernels = _kernels(provider)
                return Blas("openblas" if kernels else "other", provider, kernels)
    where = f"{wish} cannot be loaded" if wish not in ("", "openblas") else "no OpenBLAS found"
    _warn(f"{where}: matrix products run on the reference BLAS, about 40 times slower. To fix it: {INSTALL_HINT}")
    return Blas("reference")


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


class _DlInfo(ctypes.Structure):
    _fields_ = (("file", ctypes.c_char_p), *((name, ctypes.c_void_p) for name in ("base", "symbol", "address")))


def _provider() -> str | None:
    """Return the file that provides the global `cblas_sgemm`, or None."""
    process = ctypes.CDLL(None)
    try:
        symbol = ctypes.cast(process.cblas_sgemm, ctypes.c_void_p)
        dladdr = process.dladdr
    except AttributeError:
        return None
    dladdr.argtypes = (ctypes.c_void_p, ctypes.POINTER(_DlInfo))
    info = _DlInfo()
    return os.fsdecode(info.file) if dladdr(symbol, ctypes.byref(info)) and info.file else None


def _kernels(path: str) -> str:
    """Return the processor for which an OpenBLAS chose its kernels; empty for another library."""
    try:
        name = ctypes.CDLL(path).openblas_get_corename
    except AttributeError:
        return ""
    name.restype = ctypes.c_char_p
    return os.fsdecode(name())


@contextlib.contextmanager
def one_blas_thread(wanted: bool) -> Iterator[None]:
    """Run OpenBLAS on one thread within the block if `wanted`, for parallel streams."""
    before = blas_threads()
    if wanted:
        set_blas_threads(1)
    try:
        yield
    finally:
        set_blas_threads(before)


def blas_threads() -> int:
    """Return the number of OpenBLAS threads; 0 with another BLAS. It affects the last bits of matrix products."""
    openblas = _openblas()
    return int(openblas.openblas_get_num_threads()) if openblas else 0


def set_blas_threads(count: int) -> None:
    openblas = _openblas()
    if openblas and count:
        openblas.openblas_set_num_threads(count)


@functools.cache
def _openblas() -> ctypes.CDLL | None:
    library = activate()
    return ctypes.CDLL(library.path) if library.kind == "openblas" else None
