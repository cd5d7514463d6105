"""The learning rate over a run, and how far a run has come."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..config import TrainConfig


def learning_rate_factor(progress: float, warmup: float, final: float) -> float:
    """Share of the peak learning rate at `progress` in [0, 1]: a linear rise over `warmup`, then half a cosine."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return progress / warmup
    fall = (progress - warmup) / (1 - warmup) if warmup < 1 else 1.0
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * fall))


@dataclass(frozen=True)
class Span:
    """What a run is measured by: a time, or a number of steps."""

    seconds: float = 0.0
    steps: int = 0

    def progress(self, step: int, elapsed: float) -> float:
        """Where the run stands, 0 to 1, as it begins step `step` (from 0) after `elapsed` seconds."""
        return elapsed / self.seconds if self.seconds else (step + 0.5) / self.steps

    def is_over(self, step: int, elapsed: float) -> bool:
        return elapsed >= self.seconds if self.seconds else step >= self.steps


def span_of(config: TrainConfig, steps_per_epoch: int) -> Span:
    """Minutes where they are given, else steps, else epochs."""
    if config.optimization.minutes:
        return Span(seconds=60 * config.optimization.minutes)
    return Span(steps=config.optimization.max_steps or config.optimization.epochs * steps_per_epoch)
