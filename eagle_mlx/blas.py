"""On Linux, load a fast BLAS before MLX and set its threads: the BLAS in MLX's wheel is about 40 times slower."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

ENVIRONMENT = "EAGLE_MLX_BLAS"
INSTALL_HINT = "apt-get install libopenblas0-pthread (Debian, Ubuntu) or dnf install openblas-threads (Fedora)"
_CANDIDATES = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblas.so")
_CORETYPE = "OPENBLAS_CORETYPE"
_FALLBACK = "Prescott"
"""OpenBLAS's kernels for an Intel processor that it does not know, from 2004 (its driver/others/dynamic.c)."""


@dataclass(frozen=True)
class Blas:
    kind: Literal["openblas", "reference", "accelerate", "other"]  # other: a named library, such as MKL
    path: str = ""  # the library's file; empty if MLX brings its own
    kernels: str = ""  # the processor for which OpenBLAS's kernels are made; OPENBLAS_CORETYPE can name another

    def __str__(self) -> str:
        return self.kind + (f" for {self.kernels}" if self.kernels else "") + (f" ({self.path})" if self.path else "")

    @property
    def public(self) -> str:
        """The same without the library's folder, for files that others get."""
        return str(replace(self, path=Path(self.path).name))


@functools.cache
def activate() -> Blas:
    """Load OpenBLAS into the global symbol table, once, and return the BLAS that MLX will use.

    This must run before `mlx.core` is imported; `import eagle_mlx` does it. `EAGLE_MLX_BLAS=reference` keeps the BLAS
    in MLX's wheel; `EAGLE_MLX_BLAS=/path/to/lib.so` names a library. A missing library is not an error: after one
    warning, everything runs slowly on the reference BLAS. If OpenBLAS does not know the processor, this sets
    `OPENBLAS_CORETYPE`, unless the user has.
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
            _load(name)
            if provider := _provider():
                kernels = _kernels(ctypes.CDLL(provider))
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


def _kernels(library: ctypes.CDLL) -> str:
    """Return the processor for which an OpenBLAS chose its kernels; empty for another library."""
    try:
        name = library.openblas_get_corename
    except AttributeError:
        return ""
    name.restype = ctypes.c_char_p
    return os.fsdecode(name())


def _load(name: str) -> None:
    """Load a BLAS; load OpenBLAS again if it does not know the processor, because it chooses its kernels only then."""
    library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    if _kernels(library) == _FALLBACK and _CORETYPE not in os.environ and (kernels := _fitting_kernels()):
        os.environ[_CORETYPE] = kernels
        ctypes.CDLL(None).dlclose(ctypes.c_void_p(library._handle))
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)


def _fitting_kernels() -> str | None:
    """Return the newest of OpenBLAS's common kernels that this x86 processor can run."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    needs = {"SkylakeX": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}, "Haswell": {"avx2", "fma"}}
    return next((kernels for kernels, needed in needs.items() if needed.issubset(flags)), None)


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
