"""eagle-bench: tokens per second, acceptance and identity of ways to decode the same prompts, in one process.

`build_modes` makes the ways, `measure` times them in turns, `compare` tells whether two gave the same tokens.
"""

from .decoding import compare, tolerance_for
from .measure import BenchConfig, measure
from .modes import Models, build_modes
from .report import Run

__all__ = ["BenchConfig", "Models", "Run", "build_modes", "compare", "measure", "tolerance_for"]
