"""The learning rate over a run, and how far a run has come."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from ..config import TrainConfig


def learning_rate_factor(progress: float, warmup: float, final: float) -> float:
    """Share of the peak learning rate at `progress` in [0, 1]: a linear rise over `warmup`, then half a cosine."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return progress / warmup
    fall = (progress - warmup) / (1 - warmup) if warmup < 1 else 1.0
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * fall))


class Schedule(Protocol):
    """How long a run learns, and how fast at each time. Steps count from 0, `elapsed` are seconds of the run."""

    @property
    def seconds(self) -> float:
        """The second at which it is over; 0 where steps alone say so."""
        ...

    @property
    def steps(self) -> int: ...

    def progress(self, step: int, elapsed: float) -> float:
        """Where it stands, 0 to 1."""
        ...

    def is_over(self, step: int, elapsed: float) -> bool: ...

    def factor(self, step: int, elapsed: float, warmup: float, final: float) -> float:
        """Share of the peak learning rate; `warmup` and `final` as in the settings."""
        ...


@dataclass(frozen=True)
class Cosine:
    """A run over a time or a number of steps, whose rate falls as half a cosine."""

    seconds: float = 0.0
    steps: int = 0

    def progress(self, step: int, elapsed: float) -> float:
        """Where the run stands, 0 to 1, as it begins step `step` (from 0) after `elapsed` seconds."""
        return elapsed / self.seconds if self.seconds else (step + 0.5) / self.steps

    def is_over(self, step: int, elapsed: float) -> bool:
        return elapsed >= self.seconds if self.seconds else step >= self.steps

    def factor(self, step: int, elapsed: float, warmup: float, final: float) -> float:
        return learning_rate_factor(self.progress(step, elapsed), warmup, final)


_DECAY = 0.4
"""Share of the last phase over which the rate falls. That phase is half of all learning, so this is the fifth of a run
with which Haegele et al. (2024, arXiv 2405.18392) reach the loss of a cosine."""


@dataclass(frozen=True)
class WarmupStableDecay:
    """Learning between two makings of data: until a step, the last one until a time.

    The rate rises over `warmup` of the run's time, counted in time of learning. Then it stays, so that data can be
    added, and in the last phase it falls as one minus a square root (Haegele et al. 2024, arXiv 2405.18392).
    """

    begins: float
    """Second of the run."""
    seconds: float
    """Second of the run by which it is over."""
    steps: int = 0
    """Step by which it is over; 0 for the time alone."""
    before: float = 0.0
    """Seconds of learning before it."""
    total: float = 0.0
    """Seconds of the whole run."""
    last: bool = False

    def progress(self, step: int, elapsed: float) -> float:
        """Nothing within a phase goes by its share."""
        return 0.0

    def is_over(self, step: int, elapsed: float) -> bool:
        return elapsed >= self.seconds or bool(self.steps and step >= self.steps)

    def factor(self, step: int, elapsed: float, warmup: float, final: float) -> float:
        learnt = self.before + elapsed - self.begins
        rise = min(1.0, learnt / (warmup * self.total)) if warmup else 1.0
        if not self.last:
            return rise
        window = max(_DECAY * (self.seconds - self.begins), 1e-9)
        fallen = math.sqrt(min(max(1 - (self.seconds - elapsed) / window, 0.0), 1.0))
        return rise * (final + (1 - final) * (1 - fallen))


def span_of(config: TrainConfig, steps_per_epoch: int) -> Cosine:
    """Minutes where they are given, else steps, else epochs."""
    if config.optimization.minutes:
        return Cosine(seconds=60 * config.optimization.minutes)
    return Cosine(steps=config.optimization.max_steps or config.optimization.epochs * steps_per_epoch)
