"""Local processes that form a ring, as `mlx.launch` would start them."""

from __future__ import annotations

import ctypes.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import SystemRandom

import mlx.core as mx
import pytest

from tests.forks import ROOT, Fork

needs_ring = pytest.mark.skipif(not mx.distributed.is_available("ring"), reason="this MLX has no ring backend")
MPI = ctypes.util.find_library("mpi") if shutil.which("mpirun") else None
"""Path of the MPI library; None if MPI is not available."""
needs_mpi = pytest.mark.skipif(MPI is None, reason="this machine has no MPI")
_RUN = "import runpy, sys; sys.modules['wandb'] = None; runpy.run_module(sys.argv.pop(1), None, '__main__', True)"
"""Runs a module as `python -m` does, but without wandb, which mlx-lm imports if it can: a fifth of the start."""


def free_ports(count: int) -> list[int]:
    """Return ports below those that the system gives to connections, which might take one before a rank listens."""
    ports = set[int]()
    while len(ports) < count:
        port = SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.add(port)
    return [*ports]


def on_core(rank: int) -> list[str]:
    """Return a command prefix that pins a rank to a core, since MLX's waiting threads spin."""
    taskset = shutil.which("taskset")
    return [taskset, "-c", str(rank % (os.cpu_count() or 1))] if taskset else []


def start(count: int, folder: Path, module: str, *arguments: str, places: Sequence[Path] = ()) -> list[Fork]:
    """Start processes of a module. `places` are their working folders, as if on separate machines.

    With `places`, only the first process gets the arguments.
    """
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(count)]))
    return [
        Fork(
            module,
            *(() if places and rank else arguments),
            cwd=places[rank] if places else ROOT,
            env={**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank), "PYTHONPATH": str(ROOT)},
            core=rank % (os.cpu_count() or 1),  # MLX's waiting threads spin
        )
        for rank in range(count)
    ]


def ended(processes: Sequence[Fork], seconds: float = 120) -> list[tuple[str, str]]:
    """Return each process's output and errors, once all have ended; kill the rest."""
    try:
        return [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()


def printed(
    count: int, folder: Path, module: str, *arguments: str, places: Sequence[Path] = (), seconds: float = 120
) -> list[str]:
    """Return what each process printed; all must succeed."""
    processes = start(count, folder, module, *arguments, places=places)
    outputs = ended(processes, seconds)
    assert [process.returncode for process in processes] == [0] * count, [errors[-2000:] for _, errors in outputs]
    return [out for out, _ in outputs]


def printed_over_mpi(count: int, module: str, *arguments: str, seconds: float = 120) -> str:
    """Return what rank 0 prints if MPI carries the messages; the others print null.

    OpenMPI's processes yield while they wait, so there may be more of them than cores.
    """
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    crowded = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    run = subprocess.run(
        ["mpirun", "--bind-to", "none", "-n", str(count), sys.executable, "-c", _RUN, module, *arguments],
        cwd=ROOT,
        env={**os.environ, **as_root, **crowded, "MLX_MPI_LIBNAME": str(MPI), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    [output] = [line for line in run.stdout.splitlines() if line.startswith("{")]  # lines of several ranks may be mixed
    return output
