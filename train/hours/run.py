"""A run of so many hours, from nothing to a head."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle_mlx.catalog.head_registry import register
from eagle_mlx.data_pipelines import FIRST_ROWS, Limits
from eagle_mlx.errors import DataError
from eagle_mlx.target import Target, fingerprint

from ..command import Stop, Stopped
from ..config import TrainConfig
from ..data import Piece
from ..evaluation import Acceptance
from ..kinds import Head, resolved
from ..run import (
    BEST,
    Checkpoint,
    Identity,
    Run,
    Stopwatch,
    Tracker,
    check_incomplete,
    identity,
    new_head,
    run_folder,
    state,
)
from ..step import Phase
from . import journal as journals
from .bar import HoursBar
from .division import (
    EVALUATION,
    FIRST,
    HELD_OUT,
    LONGEST,
    WRITING,
    Deadline,
    Next,
    Rates,
    is_last,
    next_portion,
    prompts_to_judge,
    seconds_to_cool,
    seconds_to_end,
    seconds_to_learn,
)
from .journal import Journal, Portion
from .portions import Portions, was_begun

_BEAT = 30.0
"""Seconds of making after which the time that has passed is written down."""
_MADE = "made in the run"
"""What its identity says of the data."""


def train_for_hours(
    target: Target,
    config: TrainConfig,
    head: Head | None = None,
    resume: Path | None = None,
    stop: Stop | None = None,
    watch: Stopwatch | None = None,
    claimed: Path | None = None,
) -> dict[str, Any]:
    """Make data, train a head and have it draft the next data, for `config.optimization.hours`; returns the report.

    The folder `config.run.output` gets what `train` puts there, and the conversations in `made`. Behind each portion of
    data acceptance is measured, the best head is kept and registered for the target. With `resume`, the folder of a run
    that was cut short, that run continues at the phase it was in, with the time that it had left. Ctrl-C and SIGTERM
    save the state and raise Stopped. `claimed`: the folder, if the caller has made and locked it (`claim`).

    Raises as `train` does, DataError where the target writes nothing usable.
    """
    config, stop = resolved(config, target), stop or Stop()
    check_incomplete(resume)
    place = run_folder(config.run.output, config.run.overwrite, was_begun, resume, claimed)
    with stop.listening(), place as folder:
        who = Identity(config, fingerprint(target), _MADE)
        if resume:
            identity.check_same(folder, who)
        identity.write(folder, who)
        saved = state.newest(folder, tqdm.write) if resume else None
        with Tracker(folder, config, saved.state.progress.step if saved else None) as tracker:
            hours = Hours(target, config, head, folder, tracker, stop, watch or Stopwatch(), saved)
            with contextlib.closing(hours.bar):
                return hours.run()


class Hours:
    """The state of such a run between its phases."""

    def __init__(
        self,
        target: Target,
        config: TrainConfig,
        head: Head | None,
        folder: Path,
        tracker: Tracker,
        stop: Stop,
        watch: Stopwatch,
        saved: Checkpoint | None = None,
    ):
        self._target, self._config, self._head, self._folder = target, config, head, folder
        self._tracker, self._stop, self._watch, self._saved = tracker, stop, watch, saved
        self._total = 3600 * config.optimization.hours
        self._journal = journals.read(folder)
        self._portions = Portions(target, config, folder, head)
        self._trainer: Run | None = None
        self._evaluation = EVALUATION * self._total
        """Seconds that measuring acceptance took the last time; before the first, what it may take."""
        self.bar = HoursBar(self._total)
        self.bar.made = self._journal.made
        watch.restart(self._journal.elapsed)

    def run(self) -> dict[str, Any]:
        """From what is done to the report."""
        try:
            self._write()
            begun = self._watch.elapsed
            self._portions.make_prompts(lambda *_: self._beat() >= begun + HELD_OUT * self._total)
            last: Acceptance | None = None
            while (number := self._next()) is not None:
                self._make(number)
                last = self._learn(number)
        except Stopped:
            self._write()
            best = self._folder / BEST
            there = f"the best head so far is in {best}; " if best.exists() else ""
            tqdm.write(f"{there}what is made is kept; continue with: eagle-train --resume {self._folder}")
            raise
        return self._finish(last)

    @property
    def _end(self) -> float:
        """Second of the run at which the last measurement must begin."""
        return self._total * (1 - WRITING) - self._evaluation

    @property
    def _left(self) -> float:
        """Seconds until then."""
        return self._end - self._watch.elapsed

    @property
    def _steps(self) -> Run:
        """The steps, from the first portion on."""
        if self._trainer is None:
            self._trainer = self._open()
        return self._trainer

    def _open(self) -> Run:
        data = self._portions.data(1)
        head = self._head or new_head(self._target, data, self._config, begin=self._saved is None)
        first = self._journal.portions[0]
        rate = (first.tokens or 0) / max(first.made_seconds, 1e-9)
        if not self._journal.prompts:
            evaluation = self._config.evaluation
            asked = prompts_to_judge(evaluation.prompts, self._total, rate, evaluation.tokens)
            self._write(replace(self._journal, prompts=asked))
        prompts = self._portions.prompts()[: self._journal.prompts]
        trainer = Run(
            self._target, data, prompts, self._config, head, self._folder, self._tracker, self._stop, watch=self._watch
        )
        begin = self._watch.elapsed
        trainer.begin(self._saved)
        if self._saved is None:
            self._evaluation = self._watch.elapsed - begin
        else:
            self._watch.restart(max(begin, self._saved.state.elapsed))
        return trainer

    def _next(self) -> int | None:
        """The number of the portion to continue with; None after the last phase, in which the rate falls."""
        portions, now = self._journal.portions, self._watch.elapsed
        if portions and not portions[-1].done:
            return len(portions) - 1
        if portions and portions[-1].last:
            return None
        portion = Portion(now)
        if portions:
            following = self._following(self._left)
            portion = Portion(now, following.tokens, following.tokens > 0, following.last)
        self._write(replace(self._journal, portions=(*portions, portion)))
        return len(portions)

    def _following(self, left: float, learning: float = 0.0) -> Next:
        """The portion that comes next if so many seconds are left, after so many more seconds of learning."""
        rates, progress = self._rates(), self._steps.progress
        return next_portion(
            left,
            self._journal.made,
            progress.tokens + round(learning * rates.learnt),
            self._config.optimization.epochs,
            rates,
            self._fewest(),
            seconds_to_cool(progress.train_seconds + learning),
        )

    def _rates(self) -> Rates:
        made = next(portion for portion in reversed(self._journal.portions) if portion.tokens)
        return Rates((made.tokens or 0) / max(made.made_seconds, 1e-9), self._learnt_rate)

    @property
    def _learnt_rate(self) -> float:
        """Tokens a second in the latest phase that had time for a step; hardly any if there was none."""
        for portion in reversed(self._journal.portions):
            if portion.learned:
                return portion.learned / max(portion.learned_seconds, 1e-9)
        return max(self._steps.progress.tokens_per_second, 1e-3)

    def _fewest(self) -> int:
        """Tokens of one batch of conversations, as long as those of the latest portion."""
        portions = self._journal.portions
        number = max(number for number, portion in enumerate(portions) if portion.tokens)
        count = self._portions.conversations(number + 1) - self._portions.conversations(number)
        return round((portions[number].rows or FIRST_ROWS) * (portions[number].tokens or 0) / max(1, count))

    def _make(self, number: int) -> None:
        portion = self._journal.portions[number]
        if portion.tokens is not None:
            return
        if not portion.makes:
            self._write(self._journal.changed(number, tokens=0))
            return
        head = self._folder / BEST if number else self._config.head.init_from or None
        wanted = 0 if portion.last else portion.wanted
        try:
            tokens, rows = self._portions.make(number, wanted, portion.wanted, self._limits(number, portion), head)
        except DataError as e:
            if not number:
                raise
            tqdm.write(f"{e}; the rest of the time goes to learning from what there is")
            self._write(self._journal.changed(number, tokens=0, makes=False, last=True))
            return
        self.bar.made += tokens
        seconds = self._watch.elapsed - portion.begun
        self._write(self._journal.changed(number, tokens=tokens, made_seconds=seconds, rows=rows))

    def _limits(self, number: int, portion: Portion) -> Limits:
        """When a portion's making ends: the time that is left then is needed to learn from its tokens."""
        if not number:
            return self._first_limits(portion)
        rates, begun = self._rates(), self._watch.elapsed
        learnt, passes = self._steps.progress.tokens, self._config.optimization.epochs
        cooldown = max(seconds_to_cool(self._steps.progress.train_seconds), EVALUATION * self._total)
        fresh = sum(one.tokens or 0 for one in self._journal.portions[self._fresh(number) : number])
        deadline = Deadline(self._end, self._journal.made, learnt, passes, rates.learnt, cooldown, fresh)
        first: int | None = None
        """Tokens that were made before an interruption."""

        def enough(tokens: int, coming: int) -> bool:
            nonlocal first
            first = tokens if first is None else first
            now = self._beat()
            self.bar.making(number, now, tokens)
            rate = (tokens - first) / (now - begun) if tokens > first and now > begun else rates.made
            return deadline.left(now, tokens + coming) <= seconds_to_end(coming, rate)

        return Limits(enough=enough, over=lambda tokens: deadline.left(self._beat(), tokens) <= 0)

    def _first_limits(self, portion: Portion) -> Limits:
        """Those of the first portion. How fast the head learns is not known yet, but something must be made."""
        latest = self._watch.elapsed + LONGEST * self._left

        def enough(tokens: int, coming: int) -> bool:
            now = self._beat()
            self.bar.making(0, now, tokens)
            return now >= portion.begun + FIRST * self._total

        return Limits(enough=enough, over=lambda tokens: tokens > 0 and self._beat() >= latest)

    def _learn(self, number: int) -> Acceptance:
        """Learn from all that is made, measure acceptance, keep the state."""
        steps = self._steps
        count = number + bool(self._journal.portions[number].makes)
        steps.learn_from(self._portions.data(count))
        if self._journal.portions[number].phase is None:
            phase = self._phase(number)
            epoch = steps.progress.epoch + bool(number)
            fresh = self._fresh(number)
            self._write(self._journal.changed(number, phase=phase, epoch=epoch, fresh=fresh, last=phase.last))
        portion = self._journal.portions[number]
        assert portion.phase is not None
        steps.batches.put_first(portion.epoch, self._portions.conversations(portion.fresh))
        if steps.progress.epoch < portion.epoch:
            steps.progress.epoch, steps.progress.batch = portion.epoch, 0
        steps.span = portion.phase
        with steps.interruptible():
            steps.learn(self.bar.learning(number))
            begin = self._watch.elapsed
            found = steps.evaluate()
        self._evaluation = self._watch.elapsed - begin
        steps.save_state()
        learned = steps.progress.tokens - sum(one.learned for one in self._journal.portions[:number])
        done = {
            "learned": learned,
            "learned_seconds": begin - portion.phase.begins,
            "until": (steps.progress.epoch, steps.progress.batch),
            "acceptance_length": found.acceptance_length,
        }
        self._write(self._journal.changed(number, **done))
        self._announce(found)
        return found

    def _fresh(self, number: int) -> int:
        """The first portion of which something may not have been learned before the learning after a portion."""
        if not number:
            return 0
        before = self._journal.portions[number - 1]
        fresh = sum(one.tokens or 0 for one in self._journal.portions[before.fresh : number])
        return number if before.learned >= fresh else before.fresh

    def _phase(self, number: int) -> Phase:
        """The learning behind a portion, as long as its share of the passes takes."""
        steps, passes, now = self._steps, self._config.optimization.epochs, self._watch.elapsed
        made, learnt, left = self._journal.made, self._steps.progress.tokens, max(0.0, self._left)
        last = self._journal.portions[number].last or self._is_last(number, left)
        # The rate falls in any case, if need be in as much more time as one measurement may take.
        longest = max(left, EVALUATION * self._total) if last else LONGEST * left
        count = max(1, round(max(0, passes * made - learnt) / made * steps.batches.steps_per_epoch()))
        return Phase(
            begins=now,
            seconds=now + longest,
            steps=0 if last else steps.progress.step + count,
            before=steps.progress.train_seconds,
            total=self._total,
            last=last,
        )

    def _is_last(self, number: int, left: float) -> bool:
        """Whether nothing can be made and learned after the learning of a portion, which has so many seconds left."""
        if not number:
            return left * (1 - LONGEST) <= 2 * self._evaluation
        made, learnt, passes = self._journal.made, self._steps.progress.tokens, self._config.optimization.epochs
        needed = seconds_to_learn(made, learnt, passes, self._learnt_rate)
        seconds = min(needed, LONGEST * left)
        return is_last(left, needed) or not self._following(left - seconds - self._evaluation, seconds).tokens

    def _announce(self, found: Acceptance) -> None:
        """The best head is there for others, whatever comes of the rest of the time."""
        best = self._steps.best
        self.bar.judged(found.acceptance_length)
        if best is not None and self._folder.resolve() == Path(self._config.run.output).resolve():
            name, mark = self._config.head.target, fingerprint(self._target)
            register(self._folder / BEST, name, "trained", mark, best[1].acceptance_length, best[1].prompts)

    def _finish(self, last: Acceptance | None) -> dict[str, Any]:
        steps = self._steps
        told = ("tokens", "made_seconds", "acceptance_length")
        portions = [{name: getattr(one, name) for name in told} for one in self._journal.portions]
        report = {**steps.data.report, "portions": portions, "hours": round(self._watch.elapsed / 3600, 4)}
        steps.data = replace(steps.data, report=report)
        found = steps.finish(last or steps.evaluate(), self._learned())
        made, learned = report["tokens"], found["data"]["learned_tokens"]
        if learned < made:
            tqdm.write(
                f"{made - learned:,} of the {made:,} tokens that were made were not learned from: the time was over "
                "before; the report and the card count the others"
            )
        self._portions.remove_states(len(portions))
        return found

    def _learned(self) -> set[Piece]:
        """What the phases learned from, each from the data that there were by then."""
        found: set[Piece] = set()
        for number, portion in enumerate(self._journal.portions):
            count = self._portions.conversations(number + bool(portion.makes))
            first = self._portions.conversations(portion.fresh)
            found |= self._steps.batches.learned(portion.epoch, portion.until, count, first)
        return found

    def _beat(self) -> float:
        """The seconds that have passed, which are written down now and then, for who goes on."""
        elapsed = self._watch.elapsed
        if elapsed >= self._journal.elapsed + _BEAT:
            self._write()
        return elapsed

    def _write(self, journal: Journal | None = None) -> None:
        self._journal = replace(journal or self._journal, elapsed=self._watch.elapsed)
        journals.write(self._folder, self._journal)
