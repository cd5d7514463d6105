"""Code for the CPU only. The rest of the library and the applications import it from here.

The package has CPU versions that are faster than MLX's own: exponentials, RoPE angles shared by all layers, and
parallel streams. Code with a CPU version and a GPU version calls `use_shortcuts()` to choose.
`EAGLE_MLX_CPU_SHORTCUTS=0` turns the CPU versions off, so that a machine without a GPU can test the GPU's code path. It
does not affect the BLAS.
"""

from eagle_mlx.cpu import fastmath
from eagle_mlx.cpu.rope_cache import RopeCache
from eagle_mlx.cpu.shortcuts import (
    default_streams,
    make_streams,
    tune_process,
    use_shortcuts,
)

__all__ = [
    "RopeCache",
    "default_streams",
    "fastmath",
    "make_streams",
    "tune_process",
    "use_shortcuts",
]
