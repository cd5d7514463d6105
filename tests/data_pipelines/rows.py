"""Data for several tests of the data commands."""

from __future__ import annotations

import numpy as np

ROWS = [{"prompt": f"say {n}", "completion": f"it is {n}"} for n in range(6)]

AUX = (0, 1)
"""Layers to capture."""


def conversations(count: int = 9) -> list[tuple[list[int], list[int]]]:
    """Return random tokens with every second one to learn."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 128, n).tolist() for n in rng.integers(1, 40, count)]
    return [(row, [i % 2 for i in range(len(row))]) for row in rows]
