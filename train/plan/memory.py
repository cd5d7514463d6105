"""What this machine has left of memory and disk, and what memory a run has taken."""

from __future__ import annotations

import resource
import shutil
import sys
from pathlib import Path

import mlx.core as mx

_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes that MLX's arrays may still take without swapping.

    On a GPU what the device recommends to use at most (Metal) or has (CUDA), less what MLX holds. On a CPU what Linux
    counts as available, or what is left of the limit of a container where that is less; on a Mac, where the memory is
    one, the same as on its GPU.
    """
    info = mx.device_info(mx.Device(mx.gpu)) if mx.is_available(mx.Device(mx.gpu)) else {}
    for name in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if name in info and (sys.platform == "darwin" or mx.default_device() == mx.Device(mx.gpu)):
            return max(0, int(info[name]) - mx.get_active_memory())
    return min(_available(Path("/proc/meminfo")), _left_of_container(_CGROUP))


def free_disk(folder: str | Path) -> int:
    """Bytes that are free where a folder stands or would stand."""
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def memory_gb() -> dict[str, float]:
    """Gigabytes (10⁹ bytes): MLX's arrays now and at most, and what the process took of the system at most."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    found = {"active": mx.get_active_memory(), "peak": mx.get_peak_memory(), "process_peak": most}
    return {name: round(size / 1e9, 4) for name, size in found.items()}


def _available(meminfo: Path) -> int:
    """What the kernel says a process can get without swapping; without a limit where it does not say."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return sys.maxsize
    found = (line.split() for line in lines if line.startswith("MemAvailable:"))
    return next((int(words[1]) * 1024 for words in found), sys.maxsize)


def _left_of_container(cgroup: Path) -> int:
    """What a container's limit leaves, file pages that can be dropped counted as free; no limit where it has none."""
    try:
        limit = int((cgroup / "memory.max").read_text(encoding="ascii"))
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        stat = (line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
        droppable = sum(int(size) for name, size in stat if name in ("inactive_file", "active_file"))
    except (OSError, ValueError):
        return sys.maxsize
    return max(0, limit - used + droppable)
