"""The training loop: phases, steps, evaluations, saved states, report and plots."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Generator
from pathlib import Path
from typing import Any

from mlx.utils import tree_unflatten
from tqdm import tqdm

from eagle_mlx.command import Stop, Stopped
from eagle_mlx.errors import CheckpointError, DataError, EagleError
from eagle_mlx.files import write_whole
from eagle_mlx.hub import public_name
from eagle_mlx.progress import counted
from eagle_mlx.target import Target, arrays_of, digest_of, fingerprint

from ..config import TrainConfig, file_type
from ..data import Batches, Rows, TrainData, count_learned
from ..distributed import SINGLE_PROCESS, World
from ..evaluation import SHARE, TIMES, Acceptance, Evaluator
from ..kinds import Head, kind_of, merged, resolved
from ..report import write_plots
from ..step import NotFiniteError, Schedule, Stepper, StepResult, span_of
from . import state
from .folder import BEST, LAST, Identity, check_same, read_identity, run_folder, write_identity
from .phases import Phase, Phases, Workers
from .start import new_head, with_vocabulary
from .state import Checkpoint, Progress, RunState, Stopwatch, mean, means
from .tracker import Tracker, outcome

REPORT = "report.json"


def train(
    target: Target,
    phases: Phases,
    config: TrainConfig,
    head: Head | None = None,
    resume: Path | None = None,
    stop: Stop | None = None,
    world: World = SINGLE_PROCESS,
    watch: Stopwatch | None = None,
    claimed: Path | None = None,
) -> dict[str, Any]:
    """Train `head`, or a new head, write the results to `config.run.output`, and return the report.

    The folder gets the heads `best` (highest τ) and `last` in the layout of their kind, metrics.jsonl, report.json and
    plots. `resume`: folder of an interrupted run, which continues from its newest intact state as if it had never
    stopped. Ctrl-C and SIGTERM save the state and raise Stopped.

    `watch`: the run's stopwatch. `claimed`: the folder, if the caller has already created and locked it (`claim`).

    Raises OutputError if the folder exists or cannot be written; ConfigError if a resumed run has another target or
    other data; CheckpointError if it is complete; EagleError if the loss is not finite. In a `world`, rank 0 calls
    this, and the other ranks call `run_worker`.
    """
    config, stop = resolved(config, target), stop or Stop()
    check_incomplete(resume)
    place = run_folder(config.run.output, config.run.overwrite, resume, claimed)
    with stop.listening(), place as folder:
        adapted = digest_of(head) if head is not None and config.head.lora_rank else ""
        who = Identity(config, fingerprint(target), phases.fingerprint, world.size, adapted)
        if resume:
            check_same(folder, who)
        write_identity(folder, who)
        saved = state.newest(folder, tqdm.write) if resume else None
        with Tracker(folder, config, saved.state.progress.step if saved else None) as tracker:
            run = Run(target, config, head, folder, tracker, stop, world, watch or Stopwatch(), saved)
            return run.run(phases)


def check_incomplete(resume: Path | None) -> None:
    """Raise CheckpointError if the run is complete."""
    if resume and (resume / REPORT).exists():
        raise CheckpointError(
            f"the run in {resume} is complete; to train its head further, start another run with --init-from "
            f"{resume}/{BEST}"
        )


class Run:
    """The state of a run between its steps."""

    head: Head
    data: TrainData
    batches: Batches
    stepper: Stepper
    evaluator: Evaluator
    schedule: Schedule
    untrained: Acceptance
    best: tuple[int, Acceptance]
    """The step of the head with the largest τ, 0 for the start, and its measurement."""
    latest: Acceptance
    """The latest measurement after a step."""

    def __init__(
        self,
        target: Target,
        config: TrainConfig,
        head: Head | None,
        folder: Path,
        tracker: Tracker,
        stop: Stop,
        world: World,
        watch: Stopwatch,
        saved: Checkpoint | None = None,
    ):
        """`head`: a head to continue from. `saved`: the state of a resumed run."""
        self.target, self.config, self.folder, self.tracker, self.stop = target, config, folder, tracker, stop
        self.existing, self.watch, self.saved = head, watch, saved
        self.progress = saved.state.progress if saved else Progress()
        self.begun = False
        self.learned_until = 0.0
        """Second of the run at which the steps of the latest phase ended."""
        self._world, self._workers = world, Workers(world, stop)
        self._recent: list[StepResult] = []
        self._next_eval: float | None = None
        self._next_save = math.inf

    def run(self, phases: Phases) -> dict[str, Any]:
        """Train phase by phase and return the report."""
        last: Acceptance | None = None
        try:
            with contextlib.closing(phases.of(self)) as coming:
                for phase in coming:
                    with self._interruptible():
                        self._learn(phase)
                        last = self.evaluate()
            with self._interruptible():
                report = self.finish(last or self.evaluate(), phases)
        except Stopped:
            phases.ended(None)
            raise
        finally:
            self._workers.end()
        phases.ended(report)
        return report

    def begin(self, data: TrainData, prompts: list[list[int]], seconds: float = 0.0, times: int = 0) -> None:
        """Create the head for this data and measure it, or restore the saved state.

        `prompts`: tokens of the prompts for acceptance. `seconds`: expected for the run, to choose the number of
        prompts; 0 for all. `times`: number of measurements, if it is fixed. Raises DataError as `learn_from` does.
        """
        self.begun = True
        self.learn_from(data)
        if self.existing is None:
            self.head = new_head(self.target, data, self.config, begin=self.saved is None)
        else:
            self.head = with_vocabulary(self.existing, self.target, data.kept, self.config)
        how = self.config.evaluation
        self.evaluator = Evaluator(self.target, prompts, how.depth, how.tokens, how.batch)
        self.stepper = Stepper(self.head, self.target, self.config, self._world)
        if self.saved:
            self._restore(self.saved)
        else:
            if seconds and not how.prompts:
                self._choose_evaluations(seconds, times)
            self.untrained = self._measure()
            self.best = (self.progress.step, self.untrained)
            self._save_head(BEST, self.untrained)

    def _choose_evaluations(self, seconds: float, times: int) -> None:
        """Choose the number of prompts and of measurements by their measured cost, and record both for resumed runs."""
        how, span = self.config.evaluation, span_of(self.config, self.batches.steps_per_epoch())
        if how.minutes:
            times = math.ceil(seconds / 60 / how.minutes)
        elif how.steps:
            times = math.ceil(span.steps / how.steps)
        with self.stop.immediate():
            prompts, chosen = self.evaluator.fit(merged(self.head), SHARE * seconds, times)
        every: dict[str, float] = {}
        if not times:
            minutes = self.config.optimization.minutes
            every = {"eval_minutes": minutes / chosen} if minutes else {"eval_steps": math.ceil(span.steps / chosen)}
        self.config = self.config.changed(eval_prompts=prompts, **every)
        write_identity(self.folder, dataclasses.replace(read_identity(self.folder), config=self.config))

    def learn_from(self, data: TrainData) -> None:
        """Take batches from this data from now on. Raises DataError if it has no batches."""
        step = self.config.optimization
        self.data = data
        self.batches = Batches(data.samples, step.rows, step.length, self.config.run.seed, self._world)
        if not self.batches.steps_per_epoch():
            raise DataError("no conversation is long enough to learn from; check the data")

    @contextlib.contextmanager
    def _interruptible(self) -> Generator[None, None, None]:
        """Return a context manager in which a signal waits for the end of a step, and the state is saved."""
        with self.stop.deferred():
            try:
                yield
            except Stopped:
                self._save_interrupted()
                raise

    def _learn(self, phase: Phase) -> None:
        """Take steps until the phase's schedule is over."""
        self.schedule = phase.schedule
        if phase.fresh:
            self.batches.put_first(phase.epoch, phase.fresh)
        if self.progress.epoch < phase.epoch:
            self.progress.epoch, self.progress.batch = phase.epoch, 0
        if self._next_eval is None:
            self._next_eval = sum(self._eval_clock())
        self._plan_next_save()
        with contextlib.closing(self._all_batches()) as stream:
            for rows in stream:
                if self.schedule.is_over(self.progress.step, self.watch.elapsed):
                    break
                self.stop.check()
                if self._eval_clock()[0] >= (self._next_eval or 0.0):
                    self.evaluate()
                    self._next_eval = sum(self._eval_clock())
                    self.save_state()
                elif self.watch.elapsed >= self._next_save:
                    self.save_state()
                result = self._step(rows)
                latest = [] if result is None else [result]
                phase.bar.show(self.progress, self.watch.elapsed, self._recent or latest)
        self._log_recent()
        self.learned_until = self.watch.elapsed

    def _all_batches(self) -> Generator[Rows, None, None]:
        """Yield batches over epochs without end."""
        while True:
            with contextlib.closing(self.batches.epoch(self.progress.epoch, self.progress.batch)) as stream:
                yield from stream
            self.progress.epoch += 1
            self.progress.batch = 0

    def _step(self, rows: Rows) -> StepResult | None:
        begin = self.watch.elapsed
        factor = self._rate_factor(self.progress.step)
        self._workers.step(self.progress.epoch, self.progress.batch, factor)
        try:
            result = self.stepper(rows, factor)
        except NotFiniteError as e:
            raise self._explained(e, rows) from e
        self.progress.step += 1
        self.progress.batch += 1
        self.progress.train_seconds += self.watch.elapsed - begin
        if result is None:
            return None
        self.progress.tokens += result.tokens
        self._recent.append(result)
        if len(self._recent) == self.config.run.log_steps:
            self._log_recent()
        return result

    def _rate_factor(self, step: int) -> float:
        """Return the share of the peak learning rates at a step and the current time."""
        how = self.config.optimization
        return self.schedule.factor(step, self.watch.elapsed, how.warmup, how.final_lr)

    def _explained(self, error: NotFiniteError, rows: Rows) -> EagleError:
        """Return an error that names the suspicious samples and a remedy."""
        found = [self.data.samples.where(sample) for row in error.rows for sample in rows.samples[row]]
        what = f"check {', '.join(found)}, or lower --lr" if found else "lower --lr, since each row alone is finite"
        last = self.folder / LAST
        return EagleError(
            f"{error} at step {self.progress.step + 1}; the weights are unchanged; {what} "
            f"(now {self.config.optimization.lr:g})" + (f"; the last good head is in {last}" if last.exists() else "")
        )

    def _log_recent(self) -> None:
        if not self._recent:
            return
        values = {
            **self._counts(),
            "loss": mean([r.loss for r in self._recent]),
            "loss_by_step": means([r.loss_by_step for r in self._recent]),
            "accuracy_by_step": means([r.accuracy_by_step for r in self._recent]),
            "learning_rate_factor": self._rate_factor(self.progress.step - 1),
            "grad_norm": mean([r.grad_norm for r in self._recent]),
            "tokens_per_second": self.progress.tokens_per_second,
        }
        distances = [r.feature_loss_by_step for r in self._recent if r.feature_loss_by_step is not None]
        if distances:
            values["feature_loss_by_step"] = means(distances)
        self.tracker.log("train", self.progress.step, values)
        self._recent = []

    def _counts(self) -> dict[str, Any]:
        return {
            "epoch": self.progress.epoch,
            "tokens": self.progress.tokens,
            "train_seconds": round(self.progress.train_seconds, 3),
        }

    def _measure(self) -> Acceptance:
        with self.stop.immediate():
            found = self.evaluator.measure(merged(self.head))
        texts = {"generations": self.evaluator.generations}
        self.tracker.log("eval", self.progress.step, {**self._counts(), **dataclasses.asdict(found), **texts})
        tqdm.write(
            f"step {self.progress.step}: τ {found.acceptance_length:.3f} ± {found.interval:.3f} at depth {found.depth}"
            f", by position {' '.join(f'{a:.2f}' for a in found.acceptance_by_position)} "
            f"({counted(found.prompts, 'prompt')}, {found.left_out} left out as loops, {found.seconds:.0f} s)"
        )
        return found

    def evaluate(self) -> Acceptance:
        """Measure acceptance. Save the head as `last`, and also as `best` if τ has improved.

        The start is a candidate too, but loses a tie.
        """
        found = self.latest = self._measure()
        self._save_head(LAST, found)
        step, best = self.best
        if (found.acceptance_length, True) > (best.acceptance_length, step > 0):
            self.best = (self.progress.step, found)
            self._save_head(BEST, found)
        return found

    def _save_head(self, name: str, found: Acceptance | None = None) -> None:
        extra: dict[str, Any] = {"step": self.progress.step, "tokens": self.progress.tokens}
        if found is not None:
            extra |= {"acceptance_length": found.acceptance_length, "depth": found.depth, "prompts": found.prompts}
        if self.target.adapter is not None:
            extra["adapter"] = self.target.adapter.name
        called = public_name(self.target.name)
        kind_of(self.head).save(merged(self.head), self.folder / name, called, extra, file_type(self.config))

    def save_state(self) -> None:
        due = self._next_eval or 0.0
        now = RunState(self.progress, self.watch.elapsed, due, self.untrained, *self.best, self._recent)
        saved = Checkpoint(now, arrays_of(self.head.trainable_parameters()), self.stepper.state())
        state.save(self.folder, saved, self.config.run.checkpoints)
        self._plan_next_save()

    def _restore(self, saved: Checkpoint) -> None:
        self.head.update(tree_unflatten(list(saved.head.items())))
        self.stepper.restore(saved.stepper)
        self._workers.sync(self.stepper)
        now = saved.state
        self.progress, self.untrained, self._recent = now.progress, now.untrained, now.recent
        self.best = now.best_step, now.best
        self._next_eval = now.next_eval
        self.watch.restart(now.elapsed)
        tqdm.write(f"resuming after step {self.progress.step}")

    def _save_interrupted(self) -> None:
        """Save an interrupted run, and print how to continue it."""
        if self.progress.step:
            self._save_head(LAST)
            self.save_state()
            steps = counted(self.progress.step, "step")
            tqdm.write(f"stopped after {steps}; continue with: eagle-train --resume {self.folder}")

    def _eval_clock(self) -> tuple[float, float]:
        """Return the current position and the distance between evaluations, in steps, seconds or shares of the run."""
        how = self.config.evaluation
        if how.steps:
            return self.progress.step, how.steps
        if how.minutes:
            return self.watch.elapsed, 60 * how.minutes
        return self.schedule.progress(self.progress.step, self.watch.elapsed), 1 / TIMES

    def _plan_next_save(self) -> None:
        minutes = self.config.run.checkpoint_minutes
        self._next_save = self.watch.elapsed + 60 * minutes if minutes else math.inf

    def finish(self, last: Acceptance, phases: Phases) -> dict[str, Any]:
        """Write the report and the plots. Delete the saved states, because a complete run is never resumed."""
        data, learned = phases.summary(self)
        conversations, tokens = count_learned(self.data.samples.lengths, learned)
        counts = {"learned_conversations": conversations, "learned_tokens": tokens}
        report = outcome(self, last, {**data, **counts, "padding": round(self.batches.padding, 4)})
        write_plots(self.tracker.rows, self.folder)
        write_whole(self.folder / REPORT, (json.dumps(report, indent=2) + "\n").encode())
        state.remove(self.folder)
        self.tracker.summarize({k: v for k, v in report.items() if isinstance(v, (int, float))})
        return report
