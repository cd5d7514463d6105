"""Which BLAS a process uses. Each case runs in its own process, because a BLAS is loaded once."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_mlx import blas
from eagle_mlx.blas import prompt_threads
from eagle_mlx.blas.choice import Choice, Variant, decide
from eagle_mlx.blas.trial import ROWS
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


USERS = ("OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE", "OMP_NUM_THREADS")


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


TRIED = """
import json, os, subprocess, sys
sys.argv = {argv}
for name in {users}:
    os.environ.pop(name, None)
os.environ.update({more})
os.getloadavg = lambda: ({load}, 0.0, 0.0)
os.sched_getaffinity = lambda process: [0, 1]
def trial(command, env, **options):
    print("trial", file=sys.stderr)
    kernels = env.get("OPENBLAS_CORETYPE", "")
    few = {{"": 2.0, "Haswell": 1.0, "SkylakeX": 1.0}}[kernels] if "openblas" in command[3] else 9.0
    times = [[int(count), rows, few * float(count)] for count in command[5:] for rows in (1, 2, 4, 8, 256)]
    result = [command[3].split(":")[0], "Zen", times]
    return subprocess.CompletedProcess(command, 0, json.dumps(result))
run, subprocess.run = subprocess.run, trial
import eagle_mlx
subprocess.run = run
"""


def tried(tmp_path: Path, *argv: str, load: float = 0.0, **more: str) -> tuple[str, int]:
    """Return the BLAS of a command whose trial is given, and how many children measured."""
    more = {"EAGLE_MLX_CACHE": str(tmp_path)} | more
    out, errors = run(tmp_path, TRIED.format(argv=list(argv), load=load, users=USERS, more=more) + NAMED)
    return out, errors.splitlines().count("trial")


@linux
@openblas
def test_the_first_command_on_a_quiet_machine_measures_and_later_processes_use_its_result(tmp_path: Path) -> None:
    assert "trial" not in tried(tmp_path, "eagle-serve", load=1.9)[0], "a busy machine gives no figures"
    assert "trial" not in tried(tmp_path, "eagle-serve", "--help")[0]
    assert "trial" not in tried(tmp_path, "program.py")[0]
    out, trials = tried(tmp_path, "eagle-serve")
    assert trials > 1
    assert "1 threads in rounds, 1 for prompts: in a trial" in out
    assert tried(tmp_path, "program.py", load=9.0) == (out, 0)
    assert tried(tmp_path, "eagle-generate") == (out, 0)


@linux
@openblas
def test_a_users_threads_kernels_or_library_are_not_overridden(tmp_path: Path) -> None:
    assert "trial" in tried(tmp_path, "eagle-serve")[0]
    for users in ({"OPENBLAS_NUM_THREADS": "2"}, {"OPENBLAS_CORETYPE": "Haswell"}, {"OMP_NUM_THREADS": "1"}):
        assert "trial" not in tried(tmp_path, "eagle-serve", **users)[0]
    assert "trial" not in run(tmp_path, setting="openblas", EAGLE_MLX_CACHE=str(tmp_path))[0]


@linux
@openblas
def test_without_a_place_for_the_result_nothing_is_measured(tmp_path: Path) -> None:
    assert tried(tmp_path, "eagle-serve", EAGLE_MLX_CACHE=os.devnull)[1] == 0


@linux
@openblas
def test_a_damaged_result_is_measured_again(tmp_path: Path) -> None:
    out, _ = tried(tmp_path, "eagle-serve")
    (file,) = (tmp_path / "blas").iterdir()
    for damaged in ("", "{}", "[]", json.dumps({"decoding": {"threads": 1}})):
        file.write_text(damaged)
        again, trials = tried(tmp_path, "eagle-serve")
        assert again == out
        assert trials


@linux
@blis
def test_blis_can_be_named(tmp_path: Path) -> None:
    out, warnings = run(tmp_path, REPORT + "print(blas.blas_threads())", setting="blis")
    assert out.startswith("blis (")
    assert out.endswith("1")
    assert "Warning" not in warnings


def times(few: float, many: float, other: float = 1.0) -> dict[tuple[int, int], float]:
    """Return times of one thread, and of two that take `other` times as long."""
    of_one = {rows: many if rows == max(ROWS) else few for rows in ROWS}
    return {(count, rows): of_one[rows] * (other if count == 2 else 1.0) for rows in ROWS for count in (1, 2)}


USUAL = Variant("libopenblas.so.0", "", times(1.0, 20.0))


def test_openblas_with_its_own_settings_stays_unless_another_is_clearly_faster() -> None:
    near = Variant("libopenblas.so.0", "SkylakeX", times(0.93, 19.0))
    assert decide([USUAL, near], 2) == {"decoding": None, "training": None}
    assert decide([], 2) == {"decoding": None, "training": None}


def test_rounds_and_training_may_use_different_kernels() -> None:
    wide = Variant("libopenblas.so.0", "SkylakeX", times(1.2, 10.0, 0.95))
    assert decide([USUAL, wide], 2) == {"decoding": None, "training": Choice("libopenblas.so.0", "SkylakeX", 2, 2, 2.0)}


def test_blis_leaves_a_core_to_python_in_rounds_but_not_for_prompts() -> None:
    blis = Variant("libblis.so.4", "", times(0.5, 20.0, 0.6))
    assert decide([USUAL, blis], 2)["decoding"] == Choice("libblis.so.4", "", 1, 2, 1.91)


@pytest.mark.skipif(blas.activate().kind != "openblas", reason="another BLAS")
def test_threads_for_prompts_are_set_back() -> None:
    before = blas.blas_threads()
    with prompt_threads():
        pass
    assert blas.blas_threads() == before


@pytest.mark.skipif(sys.platform != "darwin", reason="macOS only")
def test_macos_uses_accelerate(tmp_path: Path) -> None:
    assert run(tmp_path)[0] == "accelerate"
