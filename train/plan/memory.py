"""What this machine has left of its disk, and what memory a run has taken."""

from __future__ import annotations

import resource
import shutil
import sys
from pathlib import Path

import mlx.core as mx


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
