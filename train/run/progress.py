"""How far a run has come, and the bar that shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from eagle_mlx.progress import progress_bar, tokens_per_second

from ..step import Schedule, StepResult


@dataclass
class Progress:
    step: int = 0
    tokens: int = 0
    epoch: int = 0
    batch: int = 0
    """Batches of the epoch that were learnt from."""
    train_seconds: float = 0.0
    """Seconds spent in steps, measuring acceptance left out."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.train_seconds, 1e-9)


class Shows(Protocol):
    """Whatever shows how a run goes."""

    def show(self, progress: Progress, elapsed: float, result: StepResult | None, recent: list[StepResult]) -> None: ...


class Bar:
    """The progress bar: steps of a known number, or seconds of a budget, with the time that is left.

    `done` is what a run that continues has behind it, in steps or seconds; the time left is judged by what follows.
    """

    def __init__(self, span: Schedule, done: float = 0):
        self._span = span
        total = span.seconds or span.steps
        form = "{l_bar}{bar}| {n:.0f}/{total:.0f} {unit} [{elapsed}<{remaining}{postfix}]"
        unit = "s" if span.seconds else "steps"
        self._bar = progress_bar(total=total, initial=done, desc="train", unit=unit, bar_format=form)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, progress: Progress, elapsed: float, result: StepResult | None, recent: list[StepResult]) -> None:
        position = min(elapsed, self._span.seconds) if self._span.seconds else progress.step
        self._bar.update(position - self._bar.n)
        if result is not None:
            accuracy = means([r.accuracy_by_step for r in recent or [result]])
            self._bar.set_postfix_str(
                f"loss {mean([r.loss for r in recent or [result]]):.3f}, "
                f"accuracy {' '.join(f'{a:.2f}' for a in accuracy)}, "
                f"{tokens_per_second(progress.tokens_per_second)}",
                refresh=False,
            )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def means(rows: list[list[float]]) -> list[float]:
    return [mean(list(column)) for column in zip(*rows, strict=True)]
