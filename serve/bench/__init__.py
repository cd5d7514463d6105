"""eagle-bench: compare speed, acceptance and texts of several ways to decode the same prompts, in one process.

`build_modes` makes the modes, `measure` times them in turns, `compare` checks that two gave the same tokens.
"""

from .decoding import compare, tolerance_for
from .measure import BenchConfig, measure
from .modes import Models, build_modes
from .report import Run

__all__ = ["BenchConfig", "Models", "Run", "build_modes", "compare", "measure", "tolerance_for"]
