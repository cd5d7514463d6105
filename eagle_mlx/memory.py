"""Memory: what a machine has left, what of it keys and values get, and what MLX is allowed to keep.

MLX keeps the buffers of arrays that are gone, for arrays to come, and by default as many as there is memory. Prompts
and batches of ever new lengths leave buffers that nothing fits: people report footprints of 38 to 108 GB (mlx#3350,
vllm-mlx#793). mlx-lm gives them back behind each chunk of a prompt and every 256 tokens. So does this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import mlx.core as mx

_CGROUP = Path("/sys/fs/cgroup")
_KV_SHARE = 0.8
"""Of what is free behind the weights: a forward's activations and others' programs need some too."""
_SMALL_MEMORY, _SMALL_KV_SHARE = 1 << 34, 0.6
"""The same up to 16 GiB of memory, which is 17.2e9 bytes: Macs of that size froze (vmlx-swift#421)."""
_WIRED_SHARE = 0.6
"""Of a machine's memory, what is wired at most. All that Metal recommends led to kernel panics (mlx#3186)."""
_PREFIX_SHARE = 0.25
"""The same of the pasts of ended requests, which give way to rows that decode."""
_KEPT_SHARE = 1 / 16
"""Of the device's memory, the freed buffers that MLX keeps: 3 GB of a Mac of 64, more than one forward of a chunk."""
_STEPS = 256
"""Steps between two times that freed buffers are given back, as many as in mlx-lm."""


def limit_mlx() -> None:
    """Bound what MLX keeps of freed buffers, if the device says how much memory it has."""
    kept = kept_bytes(_gpu())
    if kept is not None:
        mx.set_cache_limit(kept)


def kept_bytes(info: Mapping[str, str | int]) -> int | None:
    """Return the bytes of freed buffers that MLX may keep, for a GPU of which `mx.device_info` says this; None: all."""
    memory = device_memory(info)
    return None if memory is None else int(_KEPT_SHARE * memory)


def wire_active() -> None:
    """Keep in memory what is there now, whatever else runs. Only Metal needs it.

    Call it after the target and what drafts have been loaded: weights that were paged out would be read from the disk
    again in each round. Nothing that comes later is wired.
    """
    if mx.metal.is_available():
        info = _gpu()
        memory, recommended = (int(info[name]) for name in ("memory_size", "max_recommended_working_set_size"))
        mx.set_wired_limit(wired_bytes(mx.get_active_memory(), memory, recommended))


def wired_bytes(active: int, memory: int, recommended: int) -> int:
    """Return how many bytes to wire of `active` ones.

    `memory`: the machine's. `recommended`: what the device recommends to use at most, beyond which MLX refuses.
    """
    return max(0, min(active, int(_WIRED_SHARE * memory), recommended))


class FreedBuffers:
    """When the buffers that MLX keeps of arrays that are gone are given back to the system."""

    def __init__(self, give_back: Callable[[], object] = mx.clear_cache):
        self._give_back = give_back
        self._steps = 0

    def after_chunk(self) -> None:
        """A chunk of a prompt, or of data, has been read: what comes next is of another size."""
        self._steps = 0
        self._give_back()

    def after_step(self, is_last: bool = False) -> None:
        """A round or an optimizer's step is done; `is_last` where no other follows it soon."""
        self._steps += 1
        if is_last or self._steps >= _STEPS:
            self._steps = 0
            self._give_back()


def kv_bytes(free: int, memory: int | None) -> int:
    """Return what keys and values get of so many free bytes. `memory`: the machine's bytes, None if nobody knows."""
    is_small = memory is not None and memory <= _SMALL_MEMORY
    return max(1, int((_SMALL_KV_SHARE if is_small else _KV_SHARE) * free))


def models_bytes(free: int) -> int:
    """Return what several models get of so many free bytes, their keys and values included."""
    return max(1, int(_KV_SHARE * free))


def machine_memory() -> int | None:
    """Return the bytes of memory of this machine, None if it does not say, or if a GPU has memory of its own."""
    if mx.default_device() == mx.Device(mx.gpu) and not mx.metal.is_available():
        return None
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def prefix_cache_bytes(free: int) -> int:
    """What of that the pasts of ended requests get at most."""
    return int(_PREFIX_SHARE * free)


def free_memory() -> int:
    """Bytes that MLX's arrays may still take without swapping.

    On a GPU what the device recommends to use at most (Metal) or has (CUDA), less what MLX holds. On a CPU what Linux
    counts as available, or what is left of the limit of a container where that is less; on a Mac, where the memory is
    one, the same as on its GPU.
    """
    memory = device_memory(_gpu())
    if memory is not None and (sys.platform == "darwin" or mx.default_device() == mx.Device(mx.gpu)):
        return max(0, memory - mx.get_active_memory())
    return min(_available(Path("/proc/meminfo")), left_of_container(_CGROUP))


def device_memory(info: Mapping[str, str | int]) -> int | None:
    """What a device recommends to use at most (Metal) or has (CUDA); None where it does not say."""
    names = ("max_recommended_working_set_size", "total_memory", "memory_size")
    return next((int(info[name]) for name in names if name in info), None)


def gb(count: float) -> str:
    """So many bytes for people, in units of 10⁹ or 10⁶."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _gpu() -> Mapping[str, str | int]:
    return mx.device_info(mx.Device(mx.gpu)) if mx.is_available(mx.Device(mx.gpu)) else {}


def _available(meminfo: Path) -> int:
    """What the kernel says a process can get without swapping; without a limit where it does not say."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return sys.maxsize
    found = (line.split() for line in lines if line.startswith("MemAvailable:"))
    return next((int(words[1]) * 1024 for words in found), sys.maxsize)


def left_of_container(cgroup: Path) -> int:
    """What a container's limit leaves, file pages that can be dropped counted as free; no limit where it has none."""
    try:
        limit = int((cgroup / "memory.max").read_text(encoding="ascii"))
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        stat = (line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
        droppable = sum(int(size) for name, size in stat if name in ("inactive_file", "active_file"))
    except (OSError, ValueError):
        return sys.maxsize
    return max(0, limit - used + droppable)
