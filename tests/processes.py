"""Processes on this machine that form a ring, as `mlx.launch` would start them."""

from __future__ import annotations

import ctypes.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest

needs_ring = pytest.mark.skipif(not mx.distributed.is_available("ring"), reason="this MLX has no ring backend")
MPI = ctypes.util.find_library("mpi") if shutil.which("mpirun") else None
"""The file of its library; None where MPI cannot be used."""
needs_mpi = pytest.mark.skipif(MPI is None, reason="this machine has no MPI")
ROOT = Path(__file__).parents[1]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def on_core(rank: int) -> list[str]:
    """What starts a rank on a core of its own: threads of MLX that wait do not rest, and would take it from others."""
    taskset = shutil.which("taskset")
    return [taskset, "-c", str(rank % (os.cpu_count() or 1))] if taskset else []


def start(
    count: int, folder: Path, module: str, *arguments: str, places: Sequence[Path] = ()
) -> list[subprocess.Popen[str]]:
    """Processes of a module; `places` are the folders in which they run, as if on machines of their own.

    There the first process alone is given the arguments.
    """
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(count)]))
    return [
        subprocess.Popen(
            [*on_core(rank), sys.executable, "-m", module, *(() if places and rank else arguments)],
            cwd=places[rank] if places else ROOT,
            env={**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank), "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def ended(processes: Sequence[subprocess.Popen[str]], seconds: float = 120) -> list[tuple[str, str]]:
    """What each has written, text and errors, once all have ended; none is left behind."""
    try:
        return [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()


def printed(
    count: int, folder: Path, module: str, *arguments: str, places: Sequence[Path] = (), seconds: float = 120
) -> list[str]:
    """What each process prints; all of them must end well."""
    processes = start(count, folder, module, *arguments, places=places)
    found = ended(processes, seconds)
    assert [process.returncode for process in processes] == [0] * count, [errors[-2000:] for _, errors in found]
    return [out for out, _ in found]


def printed_over_mpi(count: int, module: str, *arguments: str, seconds: float = 120) -> str:
    """What rank 0 prints where MPI carries the messages; the others print null.

    OpenMPI's processes give way while they wait. So there may be more of them than cores.
    """
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    crowded = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    run = subprocess.run(
        ["mpirun", "--bind-to", "none", "-n", str(count), sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, **as_root, **crowded, "MLX_MPI_LIBNAME": str(MPI), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    [found] = [line for line in run.stdout.splitlines() if line != "null"]
    return found
