"""The memory that a run takes."""

from __future__ import annotations

import resource
import sys

import mlx.core as mx


def memory_gb() -> dict[str, float]:
    """Gigabytes (10⁹ bytes): MLX's arrays now and at most, and what the process took of the system at most."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    found = {"active": mx.get_active_memory(), "peak": mx.get_peak_memory(), "process_peak": most}
    return {name: round(size / 1e9, 4) for name, size in found.items()}
