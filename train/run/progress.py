"""A run's progress, stopwatch and progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from eagle_mlx.progress import progress_bar, tokens_per_second

from ..step import StepResult


@dataclass
class Progress:
    step: int = 0
    tokens: int = 0
    epoch: int = 0
    batch: int = 0
    """Batches learned in this epoch."""
    train_seconds: float = 0.0
    """Seconds spent in steps, without evaluations."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.train_seconds, 1e-9)


class Stopwatch:
    """Measures the seconds of a run, including those before interruptions."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """`clock`: a monotonic clock in seconds."""
        self._clock = clock
        self._begin = clock()

    @property
    def elapsed(self) -> float:
        return self._clock() - self._begin

    def restart(self, elapsed: float = 0.0) -> None:
        """Continue from this many seconds."""
        self._begin = self._clock() - elapsed


class Bar:
    """A progress bar in seconds if there is a time limit, else in steps, with the remaining time.

    `done`: seconds or steps before a resume, which do not count in the estimate of the remaining time.
    """

    def __init__(self, seconds: float, steps: int = 0, done: float = 0):
        self._seconds = seconds
        form = "{l_bar}{bar}| {n:.0f}/{total:.0f} {unit} [{elapsed}<{remaining}{postfix}]"
        unit = "s" if seconds else "steps"
        self.bar = progress_bar(total=seconds or steps, initial=done, desc="train", unit=unit, bar_format=form)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def show(self, progress: Progress, elapsed: float, results: list[StepResult]) -> None:
        """Show progress after `elapsed` seconds, and the mean loss and accuracy of the latest results."""
        self.bar.update((min(elapsed, self._seconds) if self._seconds else progress.step) - self.bar.n)
        if results:
            accuracy = " ".join(f"{share:.2f}" for share in means([r.accuracy_by_step for r in results]))
            speed = tokens_per_second(progress.tokens_per_second)
            text = f"loss {mean([r.loss for r in results]):.3f}, accuracy {accuracy}, {speed}"
            self.bar.set_postfix_str(text, refresh=False)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def means(rows: list[list[float]]) -> list[float]:
    return [mean(list(column)) for column in zip(*rows, strict=True)]
