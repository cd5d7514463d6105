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
_MISSING = {
    "openblas": (
        "no OpenBLAS found",
        "apt-get install libopenblas0-pthread (Debian, Ubuntu) or dnf install openblas-threads (Fedora)",
    ),
    "blis": ("no BLIS found", "apt-get install libblis4-openmp (Debian, Ubuntu)"),
}
"""The missing library and the remedy, by the value of EAGLE_MLX_BLAS."""
_OPENBLAS, _BLIS = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblas.so"), ("libblis.so.4",)
_CORETYPE = "OPENBLAS_CORETYPE"
_FALLBACK = "Prescott"
"""OpenBLAS's kernels for an Intel processor that it does not know, from 2004 (its driver/others/dynamic.c)."""
Kind = Literal["openblas", "blis", "reference", "accelerate", "other"]


@dataclass(frozen=True)
class Blas:
    kind: Kind  # other: a named library, such as MKL
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
    """Load a fast BLAS into the global symbol table, once, and return the BLAS that MLX will use.

    This must run before `mlx.core` is imported; `import eagle_mlx` does it. Without `EAGLE_MLX_BLAS`, it is OpenBLAS,
    or BLIS if there is no OpenBLAS. `openblas` and `blis` name one of them, `reference` keeps the BLAS in MLX's wheel,
    and `/path/to/lib.so` names a library. A missing library is not an error: after one warning, everything runs slowly
    on the reference BLAS. If OpenBLAS does not know the processor, it gets kernels that fit, unless
    `OPENBLAS_CORETYPE` is set.
    """
    wish = os.environ.get(ENVIRONMENT, "")
    if sys.platform == "darwin":
        return Blas("accelerate")
    if wish == "reference":
        return Blas("reference")
    if "mlx.core" in sys.modules and _provider() is None:
        _warn("mlx was imported before eagle_mlx, too late to give it OpenBLAS; import eagle_mlx first")
        return Blas("reference")
    names = {"": (*_OPENBLAS, *_BLIS), "openblas": _OPENBLAS, "blis": _BLIS}
    for name in names.get(wish, (wish,)):
        with contextlib.suppress(OSError):
            _load(name)
            if provider := _provider():
                library = ctypes.CDLL(provider)
                kernels = _kernels(library)
                kind: Kind = "openblas" if kernels else "other"
                if hasattr(library, "bli_thread_set_num_threads"):
                    kind = "blis"
                return Blas(kind, provider, kernels)
    other = f"{ENVIRONMENT}={wish} cannot be loaded", f"set {ENVIRONMENT} to openblas, blis or the path of a library"
    missing, remedy = _MISSING.get(wish or "openblas", other)
    _warn(f"{missing}: matrix products run on the reference BLAS, about 40 times slower. To fix it: {remedy}")
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


def _load(name: str) -> None:
    """Load a BLAS. OpenBLAS chooses its kernels when it is loaded; if it takes the oldest ones, it is loaded again."""
    library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    if _CORETYPE in os.environ or _kernels(library) != _FALLBACK or not (fitting := _fitting_kernels()):
        return
    os.environ[_CORETYPE] = fitting
    ctypes.CDLL(None).dlclose(ctypes.c_void_p(library._handle))
    ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    del os.environ[_CORETYPE]  # child processes choose for themselves


def _kernels(library: ctypes.CDLL) -> str:
    """Return the processor for which an OpenBLAS chose its kernels; empty for another library."""
    if not hasattr(library, "openblas_get_corename"):
        return ""
    library.openblas_get_corename.restype = ctypes.c_char_p
    return str(library.openblas_get_corename().decode())


def _fitting_kernels() -> str | None:
    """Return the newest of OpenBLAS's common kernels that this x86 processor can run."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    needs = {"SkylakeX": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}, "Haswell": {"avx2", "fma"}}
    return next((kernels for kernels, needed in needs.items() if needed.issubset(flags)), None)


@contextlib.contextmanager
def one_blas_thread(wanted: bool) -> Iterator[None]:
    """Run the BLAS on one thread within the block if `wanted`, for parallel streams."""
    before = blas_threads()
    set_blas_threads(1 if wanted else 0)
    try:
        yield
    finally:
        set_blas_threads(before)


def blas_threads() -> int:
    """Return the number of BLAS threads; 0 if unknown. It affects the last bits of matrix products."""
    kind, library = activate().kind, _library()
    if library is None:
        return 0
    if kind == "openblas":
        return int(library.openblas_get_num_threads())
    library.bli_thread_get_num_threads.restype = ctypes.c_int64
    return max(1, int(library.bli_thread_get_num_threads()))  # -1 if nothing has set it


def set_blas_threads(count: int) -> None:
    """Set the number of BLAS threads, if it is not 0 and the library can change it."""
    library = _library()
    if library is None or not count:
        return
    if activate().kind == "openblas":
        library.openblas_set_num_threads(count)
    else:
        library.bli_thread_set_num_threads(ctypes.c_int64(count))


@functools.cache
def _library() -> ctypes.CDLL | None:
    blas = activate()
    return ctypes.CDLL(blas.path) if blas.kind in ("openblas", "blis") else None
