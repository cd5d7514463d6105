"""Which BLAS a process uses. Each case runs in its own process, because a BLAS is loaded once."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.full import in_full

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MLX brings a fast BLAS of its own")

REPORT = """
from eagle_mlx import blas
import mlx.core as mx
a = mx.ones((64, 64))
assert mx.all(a @ a == 64).item()
print(blas.activate())
"""
NAMED = "from eagle_mlx import blas\nprint(blas.activate())"


def has_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


openblas = pytest.mark.skipif(not has_library("libopenblas.so.0"), reason="this machine has no OpenBLAS")
blis = pytest.mark.skipif(not has_library("libblis.so.4"), reason="this machine has no BLIS")


def run(tmp_path: Path, code: str = REPORT, setting: str | None = None, **more: str) -> tuple[str, str]:
    """Run code in a fresh interpreter with this `EAGLE_MLX_BLAS`. Return its output and its warnings."""
    environment = {name: value for name, value in os.environ.items() if name != "EAGLE_MLX_BLAS"} | more
    if setting is not None:
        environment["EAGLE_MLX_BLAS"] = setting
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@linux
@openblas
def test_openblas_is_active_and_named(tmp_path: Path) -> None:
    out, warnings = run(tmp_path)
    kernels, _, path = out.removesuffix(")").partition(" (")
    assert kernels.startswith("openblas for ")
    assert "libopenblas" in path
    assert Path(path).exists()
    assert "Warning" not in warnings


@linux
@openblas
def test_the_kernels_in_use_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kernels in ("Haswell", "Nehalem") if platform.machine() == "x86_64" else ("ARMV8",):
        monkeypatch.setenv("OPENBLAS_CORETYPE", kernels)
        out, _ = run(tmp_path, NAMED)
        assert out.lower().startswith(f"openblas for {kernels.lower()} (")


@linux
@openblas
def test_a_processor_newer_than_openblas_gets_fast_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's OpenBLAS 0.3.21 does not know a Xeon of 2023, and would take kernels of 2004, six times slower."""
    if " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    assert "Prescott" not in run(tmp_path, NAMED)[0]
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")
    assert "Prescott" in run(tmp_path, NAMED)[0], "what the user names is used"


@linux
@openblas
def test_mlx_multiplies_with_openblas(tmp_path: Path) -> None:
    code = """
from time import perf_counter
import eagle_mlx
import mlx.core as mx
a = mx.random.uniform(shape=(512, 512))
mx.eval(a)
def seconds():
    start = perf_counter()
    mx.eval(a @ a)
    return perf_counter() - start
print(min(seconds() for _ in range(COUNT)))  # the least of many: other work must not count
""".replace("COUNT", str(in_full(30, 8)))
    fast, slow = float(run(tmp_path, code)[0]), float(run(tmp_path, code, setting="reference")[0])
    # About 40 times on two idle cores.
    assert slow > 4 * fast


@linux
def test_reference_can_be_forced(tmp_path: Path) -> None:
    out, warnings = run(tmp_path, setting="reference")
    assert out == "reference"
    assert "Warning" not in warnings


@linux
@openblas
def test_a_library_can_be_named(tmp_path: Path) -> None:
    out, warnings = run(tmp_path, setting="libopenblas.so.0")
    assert out.startswith("openblas for ")
    assert "Warning" not in warnings


@linux
@openblas
def test_a_library_without_the_functions_of_openblas_can_be_used_and_described(tmp_path: Path) -> None:
    """As MKL, for example."""
    hidden = "import ctypes\n"
    hidden += "class Other(ctypes.CDLL):\n    def __getattr__(self, name):\n"
    hidden += "        if name.startswith('openblas_'): raise AttributeError(name)\n"
    hidden += "        return super().__getattr__(name)\n"
    hidden += "ctypes.CDLL = Other\n"
    threads = "from eagle_mlx.machine import describe\nprint(describe().blas_threads)\n"
    out, warnings = run(tmp_path, hidden + REPORT + threads, setting="libopenblas.so.0")
    name, count = out.splitlines()
    assert name.startswith("other (")
    assert count == "0"
    assert "Warning" not in warnings


@linux
def test_missing_library_warns_once_and_works(tmp_path: Path) -> None:
    code = REPORT + "import eagle_mlx.errors\nblas.activate()\n"
    out, warnings = run(tmp_path, code, setting="/nowhere/libnothing.so")
    assert out == "reference"
    assert warnings.count("RuntimeWarning") == 1
    assert "EAGLE_MLX_BLAS=/nowhere/libnothing.so cannot be loaded" in warnings
    assert "set EAGLE_MLX_BLAS to openblas, blis or the path of a library" in warnings


def without(*libraries: str) -> str:
    """Return code after which libraries with these names cannot be loaded."""
    return f"""
import ctypes
real = ctypes.CDLL
def cdll(name, *a, **k):
    if any(part in str(name) for part in {libraries}): raise OSError(name)
    return real(name, *a, **k)
ctypes.CDLL = cdll
"""


@linux
@blis
def test_blis_is_used_if_there_is_no_openblas(tmp_path: Path) -> None:
    out, warnings = run(tmp_path, without("openblas") + REPORT)
    assert out.startswith("blis (")
    assert "Warning" not in warnings


@linux
@pytest.mark.parametrize(
    ("wish", "missing", "package"),
    [("", "OpenBLAS", "libopenblas0-pthread"), ("blis", "BLIS", "libblis4-openmp")],
)
def test_no_fast_blas_warns_once_and_works(tmp_path: Path, wish: str, missing: str, package: str) -> None:
    out, warnings = run(tmp_path, without("openblas", "blis") + REPORT, setting=wish)
    assert out == "reference"
    assert warnings.count("RuntimeWarning") == 1
    assert f"no {missing} found" in warnings
    assert f"apt-get install {package}" in warnings


@linux
def test_importing_mlx_first_warns(tmp_path: Path) -> None:
    out, warnings = run(tmp_path, "import mlx.core\n" + REPORT)
    assert out == "reference"
    assert warnings.count("RuntimeWarning") == 1
    assert "import eagle_mlx first" in warnings


@linux
@blis
def test_blis_can_be_named(tmp_path: Path) -> None:
    out, warnings = run(tmp_path, REPORT + "print(blas.blas_threads())", setting="blis")
    assert out.startswith("blis (")
    assert out.endswith("1")
    assert "Warning" not in warnings


@pytest.mark.skipif(sys.platform != "darwin", reason="macOS only")
def test_macos_uses_accelerate(tmp_path: Path) -> None:
    assert run(tmp_path)[0] == "accelerate"
