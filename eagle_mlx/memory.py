"""Memory: how much is free, how much of it the KV cache gets, and how much MLX may keep.

MLX keeps freed buffers for later arrays, by default up to all memory. If lengths of prompts and batches vary, few of
them fit again: people report 38 to 108 GB (mlx#3350, vllm-mlx#793). Like mlx-lm, we return them to the system after
each chunk of a prompt and every 256 tokens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import mlx.core as mx

_CGROUP = Path("/sys/fs/cgroup")
_KV_SHARE = 0.8
"""The KV cache's share of the memory that is free after loading; activations and other programs use the rest."""
_SMALL_MEMORY, _SMALL_KV_SHARE = 1 << 34, 0.6
"""Machines with up to 16 GiB, and their share: Macs of that size froze (vmlx-swift#421)."""
_WIRED_SHARE = 0.6
"""The largest share of memory to wire. Wiring as much as Metal recommends led to kernel panics (mlx#3186)."""
_PREFIX_SHARE = 0.25
"""The largest share of the free memory for saved prefixes, which make room when running requests need it."""
_KEPT_SHARE = 1 / 16
"""The share of the device's memory for freed buffers: 3 GB on a Mac with 64 GB, more than a chunk's forward needs."""
_STEPS = 256  # steps after which freed buffers are returned to the system, as in mlx-lm


def limit_mlx() -> None:
    """Limit the freed buffers that MLX keeps, if the device reports its memory."""
    if (kept := kept_bytes(_gpu())) is not None:
        mx.set_cache_limit(kept)


def kept_bytes(info: Mapping[str, str | int]) -> int | None:
    """Return the bytes of freed buffers that MLX may keep, given `mx.device_info` of a GPU; None for no limit."""
    memory = device_memory(info)
    return None if memory is None else int(_KEPT_SHARE * memory)


def wire_active() -> None:
    """Wire the memory in use, so that other programs cannot page it out. Only Metal needs it.

    Call it after loading the target and the draft model: paged-out weights would be read from disk in each round.
    """
    if mx.metal.is_available():
        info = _gpu()
        memory, recommended = (int(info[name]) for name in ("memory_size", "max_recommended_working_set_size"))
        mx.set_wired_limit(wired_bytes(mx.get_active_memory(), memory, recommended))


def wired_bytes(active: int, memory: int, recommended: int) -> int:
    """Return how many `active` bytes to wire: a share of `memory`, and not more than MLX's `recommended` bytes."""
    return max(0, min(active, int(_WIRED_SHARE * memory), recommended))


class FreedBuffers:
    """Decides when to return MLX's freed buffers to the system."""

    def __init__(self, give_back: Callable[[], object] = mx.clear_cache):
        self._give_back = give_back
        self._steps = 0

    def after_step(self, is_last: bool = False) -> None:
        """Count a round or an optimizer step; `is_last` if no other of this size follows soon."""
        self._steps += 1
        if is_last or self._steps >= _STEPS:
            self._steps = 0
            self._give_back()


def kv_bytes(free: int, memory: int | None) -> int:
    """Return the KV cache's part of `free` bytes. `memory`: the machine's bytes, None if unknown."""
    is_small = memory is not None and memory <= _SMALL_MEMORY
    return max(1, int((_SMALL_KV_SHARE if is_small else _KV_SHARE) * free))


def models_bytes(free: int) -> int:
    """Return the part of `free` bytes for several models, including their KV caches."""
    return max(1, int(_KV_SHARE * free))


def machine_memory() -> int | None:
    """Return the bytes of this machine's memory; None if a GPU has its own."""
    if mx.default_device() == mx.Device(mx.gpu) and not mx.metal.is_available():
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def fits_machine(gigabytes: float) -> bool:
    """Return whether this machine's memory, or its GPU's, has so many gigabytes; true if that is unknown."""
    return gigabytes * 1e9 <= (machine_memory() or device_memory(_gpu()) or sys.maxsize)


def prefix_cache_bytes(free: int) -> int:
    """Return the most that saved prefixes may take of `free` bytes."""
    return int(_PREFIX_SHARE * free)


def free_memory() -> int:
    """Return the bytes that MLX's arrays may still take without swapping.

    On a GPU, and on a Mac's CPU, which shares the GPU's memory: the bytes that the device recommends to use (Metal) or
    has (CUDA), minus those that MLX uses. On other CPUs: the available memory, or less if a container's limit is lower.
    """
    memory = device_memory(_gpu())
    if memory is not None and (sys.platform == "darwin" or mx.default_device() == mx.Device(mx.gpu)):
        return max(0, memory - mx.get_active_memory())
    return min(_available(), left_of_container(_CGROUP))


def device_memory(info: Mapping[str, str | int]) -> int | None:
    """Return the bytes that a device recommends to use (Metal) or has (CUDA); None if unknown."""
    names = ("max_recommended_working_set_size", "total_memory", "memory_size")
    return next((int(info[name]) for name in names if name in info), None)


def gb(count: float) -> str:
    """Format bytes in units of 10⁹ or 10⁶."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _gpu() -> Mapping[str, str | int]:
    return mx.device_info(mx.Device(mx.gpu)) if mx.is_available(mx.Device(mx.gpu)) else {}


def _available() -> int:
    """Return the bytes that Linux counts as available; `sys.maxsize` if unknown."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text(encoding="ascii").splitlines() if meminfo.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), sys.maxsize)


def left_of_container(cgroup: Path) -> int:
    """Return the bytes that a container's limit leaves, counting file pages as free; `sys.maxsize` without a limit."""
    try:
        limit = int((cgroup / "memory.max").read_text(encoding="ascii"))
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        stat = (line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
        droppable = sum(int(size) for name, size in stat if name in ("inactive_file", "active_file"))
    except (OSError, ValueError):
        return sys.maxsize
    return max(0, limit - used + droppable)
