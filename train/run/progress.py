"""A run's progress, stopwatch and progress bars."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from eagle_mlx.progress import progress_bar, tokens_per_second

from ..step import Schedule, StepResult


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


Show = Callable[[Progress, float, StepResult | None, list[StepResult]], None]
"""Displays a run's progress: elapsed seconds, the latest result, and the results not yet logged."""


class Bar:
    """A progress bar in steps or seconds, with the remaining time.

    `done`: steps or seconds before a resume, which do not count in the estimate of the remaining time.
    """

    def __init__(self, span: Schedule, done: float = 0):
        self._span = span
        total = span.seconds or span.steps
        form = "{l_bar}{bar}| {n:.0f}/{total:.0f} {unit} [{elapsed}<{remaining}{postfix}]"
        unit = "s" if span.seconds else "steps"
        self.bar = progress_bar(total=total, initial=done, desc="train", unit=unit, bar_format=form)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def show(self, progress: Progress, elapsed: float, result: StepResult | None, recent: list[StepResult]) -> None:
        position = min(elapsed, self._span.seconds) if self._span.seconds else progress.step
        self.bar.update(position - self.bar.n)
        if result is not None:
            accuracy = means([r.accuracy_by_step for r in recent or [result]])
            self.bar.set_postfix_str(
                f"loss {mean([r.loss for r in recent or [result]]):.3f}, "
                f"accuracy {' '.join(f'{a:.2f}' for a in accuracy)}, "
                f"{tokens_per_second(progress.tokens_per_second)}",
                refresh=False,
            )


class HoursBar:
    """A progress bar from the first portion to the report."""

    def __init__(self, total: float, made: int):
        """`total`: seconds of the whole run."""
        self._total, self._head = total, ""
        self.made = made
        """Tokens of complete portions."""
        self._bar = progress_bar(total=total, desc="hours", bar_format="{desc}: {percentage:3.0f}%|{bar}|{postfix}")

    def judged(self, acceptance_length: float) -> None:
        """Show the head's latest τ."""
        self._head = f", τ {acceptance_length:.2f}"

    def making(self, number: int, elapsed: float, tokens: int) -> None:
        """Show the tokens made so far in portion `number`, counted from 0."""
        self._show(f"phase {number + 1} makes", elapsed, f"{self.made + tokens:,} tokens made{self._head}")

    def learning(
        self, number: int, progress: Progress, elapsed: float, result: StepResult | None, recent: list[StepResult]
    ) -> None:
        """Show the steps after portion `number`."""
        loss = mean([one.loss for one in recent or ([result] if result is not None else [])] or [0.0])
        text = f"{self.made:,} tokens made, {progress.tokens:,} learned, loss {loss:.3f}{self._head}"
        self._show(f"phase {number + 1} learns", elapsed, text)

    def close(self) -> None:
        self._bar.close()

    def _show(self, doing: str, elapsed: float, text: str) -> None:
        left = max(0, round((self._total - elapsed) / 60))
        self._bar.set_description_str(f"{doing}, {left // 60}:{left % 60:02d} h left", refresh=False)
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(min(elapsed, self._total) - self._bar.n)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def means(rows: list[list[float]]) -> list[float]:
    return [mean(list(column)) for column in zip(*rows, strict=True)]
