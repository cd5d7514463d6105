"""What only a CPU needs. The rest of the library and the applications import it from here.

`import eagle_mlx.cpu` loads a fast BLAS, which has to be there before MLX is. Beside it are ways to compute what MLX
computes, sooner on a CPU: exponentials, rotary angles found once for all layers, streams side by side.

Whoever chooses between such a way and that of a GPU asks `use_shortcuts()`. `EAGLE_MLX_CPU_SHORTCUTS=0` switches all of
them off, so that a machine without a GPU tests the way that a GPU takes. The BLAS stays: it has a variable of its own.
"""

from eagle_mlx.cpu import blas

blas.activate()  # before anything imports MLX

from eagle_mlx.cpu import fastmath  # noqa: E402
from eagle_mlx.cpu.blas import blas_threads, one_blas_thread, set_blas_threads  # noqa: E402
from eagle_mlx.cpu.rope_cache import RopeCache  # noqa: E402
from eagle_mlx.cpu.shortcuts import (  # noqa: E402
    default_streams,
    make_streams,
    tune_process,
    use_shortcuts,
    without_shortcuts,
)

__all__ = [
    "RopeCache",
    "blas",
    "blas_threads",
    "default_streams",
    "fastmath",
    "make_streams",
    "one_blas_thread",
    "set_blas_threads",
    "tune_process",
    "use_shortcuts",
    "without_shortcuts",
]
