from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys

import mlx.core as mx
import pytest

from eagle_mlx import blas
from eagle_mlx.blas import one_blas_thread
from eagle_mlx.cpu import default_streams, make_streams


def test_threads_have_their_own_streams() -> None:
    assert make_streams(1) == [mx.default_stream(mx.default_device())]
    streams = make_streams(3)
    assert len({str(stream) for stream in streams}) == 3
    results = []
    for number, stream in enumerate(streams):
        with mx.stream(stream):
            results.append(mx.sum(mx.full((10,), number)))
    mx.eval(results)
    assert [result.item() for result in results] == [0, 10, 20]
    assert 1 <= default_streams() <= (os.cpu_count() or 1)


@pytest.mark.skipif(blas.activate().kind != "openblas", reason="another BLAS")
def test_the_number_of_blas_threads_is_restored() -> None:
    library = ctypes.CDLL(blas.activate().path)
    before = library.openblas_get_num_threads()
    with contextlib.suppress(ValueError), one_blas_thread(True):
        assert library.openblas_get_num_threads() == 1
        raise ValueError
    assert library.openblas_get_num_threads() == before
    with one_blas_thread(False):
        assert library.openblas_get_num_threads() == before


def test_a_tuned_process_computes_the_same() -> None:
    program = "import eagle_mlx.cpu as cpu, mlx.core as mx; cpu.tune_process(); print(mx.arange(9).sum().item())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "36"


@pytest.mark.skipif(sys.platform != "linux", reason="MLX compiles for the CPU on Linux")
@pytest.mark.parametrize("place", ["/nonexistent", "/proc"], ids=["missing", "without room"])
def test_a_cpu_computes_without_a_folder_for_compiled_kernels(place: str) -> None:
    program = "import eagle_mlx.cpu, mlx.core as mx; print(mx.compile(lambda x: mx.exp(x) * x)(mx.array(0.0)).item())"
    environment = {name: value for name, value in os.environ.items() if name != "MLX_DISABLE_COMPILE"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "TMPDIR": place},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("0.0\n", "")
