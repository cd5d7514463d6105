"""A whole run: batches, steps, acceptance at intervals, checkpoints, report and plots."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from eagle_mlx import blas
from eagle_mlx.errors import DataError, EagleError
from eagle_mlx.hub import public_name
from eagle_mlx.target import Target

from .batches import Batches, Rows
from .config import TrainConfig
from .data import TrainData
from .evaluate import Acceptance, Evaluator
from .kinds import KINDS, Head, kind_of, settled
from .output import run_folder
from .plots import write_plots
from .progress import Bar, Progress, mean, means
from .schedule import Span, learning_rate_factor, span_of
from .step import Stepper, StepResult
from .tracker import Tracker

BEST, LAST, REPORT = "best", "last", "report.json"
_EVALS = 10
"""Evaluations of a run for which no interval is given."""


def train(
    target: Target, data: TrainData, prompts: list[list[int]], config: TrainConfig, head: Head | None = None
) -> dict[str, Any]:
    """Train a head, a new one unless one is given, into `config.output`; returns the report that is written there.

    The folder gets `best` (highest τ) and `last`, both checkpoints in the layout of their kind, metrics.jsonl,
    report.json and plots. Raises OutputError where it exists already or cannot be written, EagleError where the loss
    is not finite.
    """
    config = settled(config)
    head = head or KINDS[config.head].new(target, config, data.kept, data.aux_layers)
    output = run_folder(config.output, config.overwrite, unless=LAST)
    with output as folder, Tracker(folder, config) as tracker:
        return Run(target, data, prompts, config, head, folder, tracker).run()


class Run:
    """The state of a run between its steps."""

    def __init__(
        self,
        target: Target,
        data: TrainData,
        prompts: list[list[int]],
        config: TrainConfig,
        head: Head,
        folder: Path,
        tracker: Tracker,
    ):
        self.target, self.data, self.config, self.folder, self.tracker = target, data, config, folder, tracker
        self.head = head
        self.batches = Batches(data.samples, config.rows, config.length, config.seed)
        steps = self.batches.steps_per_epoch()
        if not steps:
            raise DataError("no conversation is long enough to learn from; check the data")
        self.span: Span = span_of(config, steps)
        self.evaluator = Evaluator(target, prompts, config.eval_depth, config.eval_tokens, config.eval_batch)
        self.progress = Progress()
        self.untrained: Acceptance | None = None
        self.best: tuple[int, Acceptance] | None = None
        self._recent: list[StepResult] = []
        self._next_eval = 0.0
        self._factor = 0.0

    def run(self) -> dict[str, Any]:
        """From the head as it begins to the report."""
        self.untrained = self._measure()
        stepper = Stepper(self.head, self.target, self.config)
        begin = time.monotonic()
        self._plan_next_eval(0.0)
        with Bar(self.span) as bar, self._kept_when_interrupted(), contextlib.closing(self._all_batches()) as stream:
            for rows in stream:
                elapsed = time.monotonic() - begin
                if self.span.is_over(self.progress.step, elapsed):
                    break
                result = self._step(stepper, rows, self.span.progress(self.progress.step, elapsed))
                elapsed = time.monotonic() - begin
                bar.show(self.progress, elapsed, result, self._recent)
                if self._eval_is_due(elapsed):
                    self._evaluate()
                    self._plan_next_eval(time.monotonic() - begin)
        self._log_recent()
        last = self._evaluate()
        report = self._report(last)
        (self.folder / REPORT).write_text(json.dumps(report, indent=2) + "\n")
        write_plots(self.tracker.rows, self.folder)
        self.tracker.summarize({k: v for k, v in report.items() if isinstance(v, (int, float))})
        return report

    def _all_batches(self) -> Generator[Rows, None, None]:
        """Batch after batch, epoch after epoch, without end."""
        while True:
            with contextlib.closing(self.batches.epoch(self.progress.epoch)) as stream:
                yield from stream
            self.progress.epoch += 1

    def _step(self, stepper: Stepper, rows: Rows, progress: float) -> StepResult | None:
        begin = time.monotonic()
        self._factor = learning_rate_factor(progress, self.config.warmup, self.config.final_lr)
        result = stepper(rows, self._factor)
        self.progress.step += 1
        self.progress.train_seconds += time.monotonic() - begin
        if result is None:
            return None
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            last = self.folder / LAST
            raise EagleError(
                f"the loss is {result.loss} and the gradient's norm {result.grad_norm} at step {self.progress.step}; "
                f"lower --lr (now {self.config.lr}), or look at the data"
                + (f"; the last good head is in {last}" if last.exists() else "")
            )
        self.progress.tokens += result.tokens
        self._recent.append(result)
        if len(self._recent) == self.config.log_steps:
            self._log_recent()
        return result

    def _log_recent(self) -> None:
        if not self._recent:
            return
        values = {
            **self._place(),
            "loss": mean([r.loss for r in self._recent]),
            "loss_by_step": means([r.loss_by_step for r in self._recent]),
            "accuracy_by_step": means([r.accuracy_by_step for r in self._recent]),
            "learning_rate_factor": self._factor,
            "grad_norm": mean([r.grad_norm for r in self._recent]),
            "tokens_per_second": self.progress.tokens_per_second,
        }
        distances = [r.feature_loss_by_step for r in self._recent if r.feature_loss_by_step is not None]
        if distances:
            values["feature_loss_by_step"] = means(distances)
        self.tracker.log("train", self.progress.step, values)
        self._recent = []

    def _place(self) -> dict[str, Any]:
        return {
            "epoch": self.progress.epoch,
            "tokens": self.progress.tokens,
            "train_seconds": round(self.progress.train_seconds, 3),
        }

    def _measure(self) -> Acceptance:
        found = self.evaluator.measure(self.head)
        self.tracker.log("eval", self.progress.step, {**self._place(), **dataclasses.asdict(found)})
        tqdm.write(
            f"step {self.progress.step}: τ {found.acceptance_length:.3f} at depth {found.depth}, by position "
            f"{' '.join(f'{a:.2f}' for a in found.acceptance_by_position)} "
            f"({found.prompts} prompts, {found.left_out} left out as loops, {found.seconds:.0f} s)"
        )
        return found

    def _evaluate(self) -> Acceptance:
        """Measure acceptance, keep the head as `last`, and as `best` where no earlier one was better."""
        found = self._measure()
        self._save(LAST, found)
        if self.best is None or found.acceptance_length > self.best[1].acceptance_length:
            self.best = (self.progress.step, found)
            self._save(BEST, found)
        return found

    def _save(self, name: str, found: Acceptance | None = None) -> None:
        extra: dict[str, Any] = {"step": self.progress.step, "tokens": self.progress.tokens}
        if found is not None:
            extra |= {"acceptance_length": found.acceptance_length, "depth": found.depth}
        called = public_name(self.target.name)
        kind_of(self.head).save(self.head, self.folder / name, called, extra)

    @contextlib.contextmanager
    def _kept_when_interrupted(self) -> Generator[None, None, None]:
        try:
            yield
        except KeyboardInterrupt:
            if self.progress.step:
                self._save(LAST)
                tqdm.write(f"interrupted after {self.progress.step} steps; the head so far is in {self.folder / LAST}")
            raise

    def _plan_next_eval(self, elapsed: float) -> None:
        config = self.config
        if config.eval_steps:
            self._next_eval = self.progress.step + config.eval_steps
        elif config.eval_minutes:
            self._next_eval = elapsed + 60 * config.eval_minutes
        else:
            self._next_eval = self.span.progress(self.progress.step, elapsed) + 1 / _EVALS

    def _eval_is_due(self, elapsed: float) -> bool:
        if self.span.is_over(self.progress.step, elapsed):
            return False  # the run's end measures it anyway
        now = self.span.progress(self.progress.step, elapsed)
        if self.config.eval_steps:
            now = self.progress.step
        elif self.config.eval_minutes:
            now = elapsed
        return now >= self._next_eval

    def _report(self, last: Acceptance) -> dict[str, Any]:
        assert self.best is not None
        assert self.untrained is not None
        best_step, best = self.best
        logged = [row for row in self.tracker.rows if row["kind"] == "train"]
        return {
            "target": self.target.name,
            "kind": kind_of(self.head).name,
            "started_from": self.config.init_from or None,
            "acceptance_length": best.acceptance_length,
            "acceptance_by_position": best.acceptance_by_position,
            "untrained_acceptance_length": self.untrained.acceptance_length,
            "best_step": best_step,
            "acceptance": {
                name: dataclasses.asdict(found)
                for name, found in (("untrained", self.untrained), ("best", best), ("last", last))
            },
            "loss": logged[-1]["loss"] if logged else None,
            "accuracy_by_step": logged[-1]["accuracy_by_step"] if logged else None,
            "steps": self.progress.step,
            "tokens": self.progress.tokens,
            "train_seconds": self.progress.train_seconds,
            "tokens_per_second": self.progress.tokens_per_second,
            "data": self.data.report,
            "head": dataclasses.asdict(self.head.config),
            "config": dataclasses.asdict(self.config),
            "machine": {
                "platform": platform.platform(),
                "device": str(mx.default_device()),
                "blas": str(blas.activate()),
                "mlx": importlib.metadata.version("mlx"),
            },
        }
