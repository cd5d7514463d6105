"""The training loop: phases, steps, evaluations, saved states, report and plots."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from mlx.utils import tree_unflatten
from tqdm import tqdm

from eagle_mlx.command import Stopped
from eagle_mlx.errors import DataError, EagleError
from eagle_mlx.files import write_whole
from eagle_mlx.formats.tensors import arrays_of, weights_of
from eagle_mlx.heads.base import DRAFT_WINDOW
from eagle_mlx.hub import public_name
from eagle_mlx.machine import describe
from eagle_mlx.paired import FEWEST
from eagle_mlx.progress import counted

from ..adaptation import Adaptation, copy_head
from ..config import file_type, pass_type
from ..data import Batches, Piece, Rows, TrainData, count_learned, public_settings
from ..evaluation import SHARE, TIMES, Acceptance, Evaluator
from ..kinds import kind_of, merged
from ..report import write_plots
from ..step import NotFiniteError, Schedule, Stepper, StepResult, span_of
from . import state
from .folder import BEST, LAST, REPORT, read_identity, write_identity
from .start import Setup, new_head, with_vocabulary
from .state import Bar, Progress, RunCheckpoint, RunState, mean


@dataclass(frozen=True)
class Phase:
    batches: Batches
    schedule: Schedule
    bar: Bar
    epoch: int = 0  # the first epoch, unless the run is already in a later one


@dataclass(frozen=True)
class Result:
    acceptance: Acceptance
    until: float  # second of the run at which its steps ended


def train(setup: Setup, data: TrainData, prompts: list[list[int]], seconds: float = 0.0) -> dict[str, Any]:
    """Train on all data until time, steps or epochs are over; return the report.

    The folder gets the heads `best` (highest τ) and `last`, metrics.jsonl, report.json and plots. `prompts` and
    `seconds` are as in `Run`. A signal saves the state and raises Stopped. Raises DataError if there is nothing to
    learn, EagleError if the loss is not finite.
    """
    run = Run(setup, data, prompts, seconds)
    if setup.saved is None:
        run.watch.restart()
    schedule = span_of(run.config, run.batches.steps_per_epoch())
    is_timed = schedule.seconds < math.inf
    with Bar(schedule.seconds, schedule.steps, run.watch.elapsed if is_timed else run.progress.step) as bar:
        result = run.learn(Phase(run.batches, schedule, bar))
    learned = run.batches.learned(0, (run.progress.epoch, run.progress.batch))
    return run.finish(result.acceptance, run.batches, data.report, learned)


class Run:
    """A head in training: what a saved state holds, and what the next step needs."""

    def __init__(self, setup: Setup, data: TrainData, prompts: list[list[int]], seconds: float = 0.0, times: int = 0):
        """Create the head for this data and measure it, or restore the saved state.

        `prompts`: tokens of the prompts for acceptance. `seconds`: expected for the run, to choose the number of
        prompts; 0 for all. `times`: number of measurements, if it is fixed. Raises DataError if there are no batches.
        """
        self.config, self.watch = setup.config, setup.watch
        self._setup, self._adaptation = setup, setup.adaptation
        self.batches = setup.batches(data)
        saved, target, measuring = setup.saved, setup.target, setup.config.evaluation
        if setup.head is None:
            self.head = new_head(target, data, self.config, begin=saved is None)
        else:
            self.head = with_vocabulary(setup.head, target, data.kept, self.config)
        self._before = None if setup.adaptation is None else weights_of(merged(self.head))
        self._evaluator = Evaluator(target, prompts, measuring.depth, measuring.tokens, measuring.batch)
        self._stepper = Stepper(self.head, target, self.config, setup.workers.world)
        if saved is not None:
            self.head.update(tree_unflatten(list(saved.head.items())))
            self._stepper.restore(saved.stepper)
        self._stepper.sync()
        self.progress = Progress()
        self._recent: list[StepResult] = []
        self._next_eval: float | None = None
        self._next_save = math.inf
        # `best`: the step and the measurement of the head with the largest τ; step 0 for the start
        self.untrained, self.best = self._restore(saved.state) if saved else self._begin(seconds, times)

    def _begin(self, seconds: float, times: int) -> tuple[Acceptance, tuple[int, Acceptance]]:
        if seconds and not (self.config.evaluation.prompts or self._adaptation):
            self._choose_evaluations(seconds, times)
        untrained = self._measure()
        self._save_head(BEST, untrained)  # if the head's layout cannot express it, the run ends here
        if self._adaptation is not None:
            if untrained.prompts < FEWEST:
                usable = f"the answers to {untrained.left_out} of {untrained.prompts + untrained.left_out} prompts loop"
                raise DataError(f"{usable}, but the judge needs {FEWEST} others; use --eval-data or --eval-prompts")
            copy_head(self._adaptation.files.folder, self._setup.folder / BEST)
        return untrained, (0, untrained)

    def _restore(self, now: RunState) -> tuple[Acceptance, tuple[int, Acceptance]]:
        self.progress, self._recent = now.progress, now.recent
        self._next_eval = now.next_eval
        self.watch.restart(now.elapsed)
        tqdm.write(f"resuming after step {self.progress.step}")
        return now.untrained, (now.best_step, now.best)

    def _choose_evaluations(self, seconds: float, times: int) -> None:
        """Choose the number of prompts and of measurements by their measured cost, and record both for resumed runs."""
        every, span = self.config.evaluation, span_of(self.config, self.batches.steps_per_epoch())
        if every.minutes:
            times = math.ceil(seconds / 60 / every.minutes)
        elif every.steps and span.steps < math.inf:
            times = math.ceil(span.steps / every.steps)
        with self._setup.stop.immediate():
            prompts, chosen = self._evaluator.fit(merged(self.head), SHARE * seconds, times)
        changes: dict[str, float] = {"eval_prompts": prompts}
        if not times and (minutes := self.config.optimization.minutes):
            changes["eval_minutes"] = minutes / chosen
        elif not times:
            changes["eval_steps"] = math.ceil(span.steps / chosen)
        self.config = self.config.changed(**changes)
        write_identity(self._setup.folder, dataclasses.replace(read_identity(self._setup.folder), config=self.config))

    @contextlib.contextmanager
    def _interruptible(self) -> Generator[None, None, None]:
        """Let signals wait for the end of a step, and save the state when the run is stopped."""
        with self._setup.stop.deferred():
            try:
                yield
            except Stopped:
                self._save_interrupted()
                raise

    def learn(self, phase: Phase) -> Result:
        """Take steps until the phase's schedule is over, and measure the head. A signal saves the state."""
        with self._interruptible():
            if self.progress.epoch < phase.epoch:
                self.progress.epoch, self.progress.batch = phase.epoch, 0
            if self._next_eval is None:
                self._next_eval = sum(self._eval_clock(phase.schedule))
            self._plan_next_save()
            with contextlib.closing(self._all_batches(phase.batches)) as stream:
                for rows in stream:
                    if phase.schedule.is_over(self.progress.step, self.watch.elapsed):
                        break
                    self._setup.stop.check()
                    self._save_if_due(phase.schedule)
                    result = self._step(phase, rows)
                    phase.bar.show(self.watch.elapsed, self.progress, self._recent or ([result] if result else []))
            self._log_recent(phase.schedule)
            until = self.watch.elapsed
            return Result(self.evaluate(), until)

    def _save_if_due(self, schedule: Schedule) -> None:
        """Measure and save the state, or only save it, if it is time."""
        if self._eval_clock(schedule)[0] >= (self._next_eval or 0.0):
            self.evaluate()
            self._next_eval = sum(self._eval_clock(schedule))
            self.save_state()
        elif self.watch.elapsed >= self._next_save:
            self.save_state()

    def _all_batches(self, batches: Batches) -> Generator[Rows, None, None]:
        while True:
            with contextlib.closing(batches.epoch(self.progress.epoch, self.progress.batch)) as stream:
                yield from stream
            self.progress.epoch += 1
            self.progress.batch = 0

    def _step(self, phase: Phase, rows: Rows) -> StepResult | None:
        begin = self.watch.elapsed
        factor = self._rate_factor(phase.schedule, self.progress.step)
        self._setup.workers.step(self.progress.epoch, self.progress.batch, factor)
        try:
            result = self._stepper(rows, factor)
        except NotFiniteError as e:
            raise self._explained(e, phase.batches, rows) from e
        self.progress.step += 1
        self.progress.batch += 1
        self.progress.train_seconds += self.watch.elapsed - begin
        if result is None:
            return None
        self.progress.tokens += result.tokens
        self._recent.append(result)
        if len(self._recent) >= self.config.run.log_steps:  # a resumed run may log more often
            self._log_recent(phase.schedule)
        return result

    def _rate_factor(self, schedule: Schedule, step: int) -> float:
        rates = self.config.optimization
        return schedule.factor(step, self.watch.elapsed, rates.warmup, rates.final_lr)

    def _explained(self, error: NotFiniteError, batches: Batches, rows: Rows) -> EagleError:
        """Return an error that names the batch's samples and a remedy."""
        numbers = sorted({sample for samples in rows.samples for sample in samples})
        places = ", ".join(map(batches.samples.where, numbers))
        last = self._setup.folder / LAST
        return EagleError(
            f"{error} at step {self.progress.step + 1}; the weights are unchanged; lower --lr (now "
            f"{self.config.optimization.lr:g}), or check what it learned from: {places}"
            + (f"; the last good head is in {last}" if last.exists() else "")
        )

    def _log_recent(self, schedule: Schedule) -> None:
        if not self._recent:
            return
        values = {
            **self._counts(),
            "loss": mean([r.loss for r in self._recent]),
            "loss_by_step": mean([r.loss_by_step for r in self._recent]),
            "accuracy_by_step": mean([r.accuracy_by_step for r in self._recent]),
            "learning_rate_factor": self._rate_factor(schedule, self.progress.step - 1),
            "grad_norm": mean([r.grad_norm for r in self._recent]),
            "tokens_per_second": self.progress.tokens_per_second,
        }
        distances = [r.feature_loss_by_step for r in self._recent if r.feature_loss_by_step is not None]
        if distances:
            values["feature_loss_by_step"] = mean(distances)
        self._setup.tracker.log("train", self.progress.step, values)
        self._recent = []

    def _counts(self) -> dict[str, Any]:
        return {
            "epoch": self.progress.epoch,
            "tokens": self.progress.tokens,
            "train_seconds": round(self.progress.train_seconds, 3),
        }

    def _measure(self) -> Acceptance:
        with self._setup.stop.immediate():
            measured = self._evaluator.measure(merged(self.head, self._before))
        values = {**measured.figures, "generations": self._evaluator.generations}
        self._setup.tracker.log("eval", self.progress.step, {**self._counts(), **values})
        spread = f" ± {measured.interval:.3f}" if measured.interval else ""
        tqdm.write(
            f"step {self.progress.step}: τ {measured.acceptance_length:.3f}{spread} at depth "
            f"{measured.depth}, by position {' '.join(f'{a:.2f}' for a in measured.acceptance_by_position)} "
            f"({counted(measured.prompts, 'prompt')}, {measured.left_out} left out as loops, {measured.seconds:.0f} s)"
        )
        return measured

    def evaluate(self) -> Acceptance:
        """Measure acceptance. Save the head as `last`, and also as `best` if τ has improved; the start loses a tie.

        A larger τ on the same prompts is enough: waiting for a significant gain would keep early heads. An adapted head
        is not chosen here: the judge compares the last one, on the same prompts.
        """
        measured = self._measure()
        self._save_head(LAST, measured)
        step, best = self.best
        if (gain := measured.gain_over(best)) is not None:
            tqdm.write(f"against the best head so far, of step {step}: {gain}")
        if self._adaptation is None and (measured.acceptance_length, True) > (best.acceptance_length, step > 0):
            self.best = (self.progress.step, measured)
            self._save_head(BEST, measured)
        return measured

    def _save_head(self, name: str, measured: Acceptance | None = None) -> None:
        extra: dict[str, Any] = {"step": self.progress.step, "tokens": self.progress.tokens}
        if measured is not None:
            extra |= {key: getattr(measured, key) for key in ("acceptance_length", "depth", "prompts")}
        if self.head.draft_window is not None:
            extra[DRAFT_WINDOW] = self.head.draft_window
        if self._setup.target.adapter is not None:
            extra["adapter"] = self._setup.target.adapter.name
        target = public_name(self._setup.target.name)
        head, folder = merged(self.head, self._before), self._setup.folder / name
        if self._adaptation is None:
            kind_of(self.head).save(head, folder, target, extra, file_type(self.config))
        else:
            self._adaptation.save(head, folder, target, extra, self.config)

    def _judge(self, adaptation: Adaptation, last: Acceptance) -> dict[str, Any]:
        """Judge the last head, which becomes the best one only if it is better than the original."""
        folder = self._setup.folder
        with self._setup.stop.immediate():
            verdict = adaptation.judge(folder / LAST)
        if verdict["taken"]:
            copy_head(folder / LAST, folder / BEST)
            self.best = (self.progress.step, last)
        return verdict

    def save_state(self) -> None:
        due = self._next_eval or 0.0
        now = RunState(self.progress, self.watch.elapsed, due, self.untrained, *self.best, self._recent)
        saved = RunCheckpoint(now, arrays_of(self.head.trainable_parameters()), self._stepper.state())
        state.save(self._setup.folder, saved, self.config.run.checkpoints)
        self._plan_next_save()

    def _save_interrupted(self) -> None:
        if self.progress.step:
            self._save_head(LAST)
            self.save_state()
            steps = counted(self.progress.step, "step")
            tqdm.write(f"stopped after {steps}; continue with: eagle-train --resume {self._setup.folder}")

    def _eval_clock(self, schedule: Schedule) -> tuple[float, float]:
        """Return the current position and the distance between evaluations, in steps, seconds or shares of the run."""
        every = self.config.evaluation
        if every.steps:
            return self.progress.step, every.steps
        if every.minutes:
            return self.watch.elapsed, 60 * every.minutes
        # No measurement chooses an adapted head, so the start and the end are enough.
        return schedule.progress(self.progress.step, self.watch.elapsed), math.inf if self._adaptation else 1 / TIMES

    def _plan_next_save(self) -> None:
        minutes = self.config.run.checkpoint_minutes
        self._next_save = self.watch.elapsed + 60 * minutes if minutes else math.inf

    def finish(
        self, last: Acceptance | None, batches: Batches, facts: Mapping[str, Any], learned: Collection[Piece]
    ) -> dict[str, Any]:
        """Write the report and the plots. Delete the saved states, because a complete run is never resumed.

        `last`: the final measurement; None to measure now. `facts`: about the data. `learned`: its pieces in `batches`
        that were learned.
        """
        with self._interruptible():
            last = last or self.evaluate()
            folder, tracker = self._setup.folder, self._setup.tracker
            verdict = self._judge(self._adaptation, last) if self._adaptation is not None else None
            conversations, tokens = count_learned(batches.samples.lengths, learned)
            counts = {"learned_conversations": conversations, "learned_tokens": tokens}
            report = self._report(last, {**facts, **counts, "padding": round(batches.padding, 4)})
            report["adapted"] = verdict
            write_plots(tracker.rows, folder)
            write_whole(folder / REPORT, (json.dumps(report, indent=2) + "\n").encode())
            state.remove(folder)
            tracker.summarize({k: v for k, v in report.items() if isinstance(v, (int, float))})
            return report

    def _report(self, last: Acceptance, data: Mapping[str, Any]) -> dict[str, Any]:
        (best_step, best), config, progress = self.best, self.config, self.progress
        gain = best.gain_over(self.untrained)
        logged = [row for row in self._setup.tracker.rows if row["kind"] == "train"]
        acceptance = {"untrained": self.untrained, "best": best, "last": last}
        return {
            "target": public_name(self._setup.target.name),
            "kind": kind_of(self.head).name,
            "started_from": public_name(config.head.init_from) if config.head.init_from else None,
            "acceptance_length": best.acceptance_length,
            "acceptance_by_position": best.acceptance_by_position,
            "untrained_acceptance_length": self.untrained.acceptance_length,
            "best_step": best_step,
            "better_than_start": best_step > 0,
            "gain_over_start": dataclasses.asdict(gain) if gain is not None else None,
            "acceptance": {name: measured.figures for name, measured in acceptance.items()},
            **{name: logged[-1][name] if logged else None for name in ("loss", "accuracy_by_step")},
            "steps": progress.step,
            **{name: getattr(progress, name) for name in ("tokens", "train_seconds", "tokens_per_second")},
            "data": data,
            "head": dataclasses.asdict(self.head.config),
            "config": public_settings(config),
            "machine": {**dataclasses.asdict(describe()), "dtype": str(pass_type(config)).rpartition(".")[2]},
        }
