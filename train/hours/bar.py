"""The progress bar of a run of so many hours: its time, and what came of it."""

from __future__ import annotations

from eagle_mlx.progress import progress_bar

from ..run import Progress, mean
from ..step import StepResult


class HoursBar:
    """One bar from the first portion to the report."""

    def __init__(self, total: float):
        """`total`: seconds."""
        self._total, self._head = total, ""
        self.made = 0
        """Tokens of the portions that are whole."""
        self._bar = progress_bar(total=total, desc="hours", bar_format="{desc}: {percentage:3.0f}%|{bar}|{postfix}")

    def judged(self, acceptance_length: float) -> None:
        """The head's τ as it was measured last."""
        self._head = f", τ {acceptance_length:.2f}"

    def making(self, number: int, elapsed: float, tokens: int) -> None:
        """A portion, counted from 0, has so many tokens by now."""
        self._show(f"phase {number + 1} makes", elapsed, f"{self.made + tokens:,} tokens made{self._head}")

    def learning(self, number: int) -> LearningBar:
        """What shows the steps behind a portion."""
        return LearningBar(self, number)

    def learnt(
        self, number: int, elapsed: float, progress: Progress, result: StepResult | None, recent: list[StepResult]
    ) -> None:
        loss = mean([one.loss for one in recent or ([result] if result is not None else [])] or [0.0])
        said = f"{self.made:,} tokens made, {progress.tokens:,} learnt, loss {loss:.3f}{self._head}"
        self._show(f"phase {number + 1} learns", elapsed, said)

    def close(self) -> None:
        self._bar.close()

    def _show(self, doing: str, elapsed: float, said: str) -> None:
        left = max(0, round((self._total - elapsed) / 60))
        self._bar.set_description_str(f"{doing}, {left // 60}:{left % 60:02d} h left", refresh=False)
        self._bar.set_postfix_str(said, refresh=False)
        self._bar.update(min(elapsed, self._total) - self._bar.n)


class LearningBar:
    """Shows the steps of one phase."""

    def __init__(self, bar: HoursBar, number: int):
        self._bar, self._number = bar, number

    def show(self, progress: Progress, elapsed: float, result: StepResult | None, recent: list[StepResult]) -> None:
        self._bar.learnt(self._number, elapsed, progress, result, recent)
