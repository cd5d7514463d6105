"""Memory: what a machine has left, what of it keys and values get, and what MLX is allowed to keep.

MLX keeps the buffers of arrays that are gone, for arrays to come, and by default as many as there is memory. Prompts
and batches of ever new lengths leave buffers that nothing fits: people report footprints of 38 to 108 GB (mlx#3350,
vllm-mlx#793). mlx-lm gives them back behind each chunk of a prompt and every 256 tokens. So does this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

_CGROUP = Path("/sys/fs/cgroup")
_KV_SHARE = 0.8
"""Of what is free behind the weights: a forward's activations and others' programs need some too."""
_PREFIX_SHARE = 0.25
"""The same of the pasts of ended requests, which give way to rows that decode."""
_KEPT_SHARE = 1 / 16
"""Of the device's memory, the freed buffers that MLX keeps: 3 GB of a Mac of 64, more than one forward of a chunk."""
_STEPS = 256
"""Steps between two times that freed buffers are given back, as many as in mlx-lm."""


@dataclass(frozen=True)
class MLXLimits:
    """What MLX is told of a device's memory, in bytes; None leaves its own."""

    kept: int | None
    """Buffers of arrays that are gone."""
    wired: int | None
    """Arrays that stay in memory, whatever else runs: weights that were paged out would be read in anew each round."""

    @classmethod
    def of(cls, info: Mapping[str, str | int], metal: bool) -> MLXLimits:
        """For a GPU of which `mx.device_info` says this; with no memory of its own there is nothing to limit."""
        memory = device_memory(info)
        return cls(None if memory is None else int(_KEPT_SHARE * memory), memory if metal else None)


def limit_mlx() -> None:
    """Bound what MLX keeps of freed buffers, and wire the arrays on Metal, as mlx-lm does. A model has been loaded."""
    limits = MLXLimits.of(_gpu(), mx.metal.is_available())
    if limits.kept is not None:
        mx.set_cache_limit(limits.kept)
    if limits.wired is not None:
        mx.set_wired_limit(limits.wired)


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


def kv_bytes(free: int) -> int:
    """What keys and values get of so much free memory, in bytes."""
    return max(1, int(_KV_SHARE * free))


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
    return min(_available(Path("/proc/meminfo")), _left_of_container(_CGROUP))


def device_memory(info: Mapping[str, str | int]) -> int | None:
    """What a device recommends to use at most (Metal) or has (CUDA); None where it does not say."""
    names = ("max_recommended_working_set_size", "total_memory", "memory_size")
    return next((int(info[name]) for name in names if name in info), None)


def gb(count: int) -> str:
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
