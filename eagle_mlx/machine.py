"""A description of the machine on which figures were measured."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from eagle_mlx import blas


@dataclass(frozen=True)
class Machine:
    cpu: str
    cores: int
    memory_gb: float
    os: str
    python: str
    mlx: str
    mlx_lm: str
    device: str  # the device on which MLX computes: cpu, or the GPU's name
    blas: str
    blas_threads: int  # 0 if unknown

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} cores, {self.os}, mlx {self.mlx} on {self.device}, blas {self.blas}"


def describe() -> Machine:
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        os=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        mlx=version("mlx"),
        mlx_lm=version("mlx-lm"),
        device="cpu" if on_cpu else str(mx.device_info().get("device_name", "gpu")),
        blas=blas.activate().public,
        blas_threads=blas.blas_threads(),
    )


def _cpu() -> str:
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.machine()
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def wired_limit_mb() -> int | None:
    """Return the megabytes that macOS lets the GPU wire; 0 is the system's default, None unknown."""
    limit = _sysctl("iogpu.wired_limit_mb") if sys.platform == "darwin" else ""
    return int(limit) if limit.isdecimal() else None


def _sysctl(name: str) -> str:
    return subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=False).stdout.strip()
