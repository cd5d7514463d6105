"""A run with a time limit: each phase makes a portion of data, then learns from all data so far.

The division of time between the two is computed from measured speeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle_mlx.catalog.head_search import register
from eagle_mlx.command import Stopped
from eagle_mlx.data_pipelines import MakeLimits
from eagle_mlx.errors import DataError
from eagle_mlx.target import fingerprint

from ..data import Piece, TrainData
from ..run import BEST, Bar, Phase, Result, Run, Setup
from ..step import WarmupStableDecay
from .portions import Journal, Portion, Portions

FIRST = 1 / 40
"""Share of the time for making the first portion. A head then drafts the second one after 1/20 of the time, and five
portions, each doubling the data, fill all of it."""
EVALUATION = 1 / 100  # share of the time for a measurement of acceptance, before one is timed
LONGEST = 1 / 4  # maximum share of the remaining time for a phase before the last, so that some is left for new data
COOLDOWN = 1 / 2
"""Minimum length of the last phase, as a share of all earlier learning. The learning rate falls over 0.4 of that phase,
which is a fifth of the earlier learning, as in Haegele et al. (2024, arXiv 2405.18392)."""
FINGERPRINT = "made in the run"  # stands for the fingerprint of the data, which a resumed run continues
_BEAT = 30.0  # seconds between writes of the elapsed time while data is made


@dataclass(frozen=True)
class Rates:
    """Tokens per second made and learned, as measured in this run."""

    made: float
    learned: float


def seconds_to_learn(made: int, learned: int, passes: int, rate: float) -> float:
    """Return the seconds left to complete `passes` over the `made` tokens at `rate` tokens per second."""
    return max(0.0, passes * made - learned) / rate


def next_portion(
    left: float, made: int, learned: int, passes: int, rates: Rates, cooldown: float = 0.0
) -> tuple[int, bool]:
    """Return the tokens of the next portion, 0 for none, and whether it is the last.

    It doubles the data or, if another would not fit after it, fills the remaining time: x tokens so that x / rates.made
    plus `seconds_to_learn` for made + x tokens equals the `left` seconds. The last phase takes at least `cooldown`.
    """
    room = left - seconds_to_learn(made, learned, passes, rates.learned)
    most = room / (1 / rates.made + passes / rates.learned)
    if passes * (made + most) - learned < cooldown * rates.learned:
        most = (left - cooldown) * rates.made
    if most < made / 10:  # not worth making: the time goes to learning instead
        return 0, True
    return (max(1, round(most)), True) if most < 2 * made else (made, False)


def train_for_hours(setup: Setup, learning: float = 0.0, reading: float = math.inf) -> dict[str, Any]:
    """Make data, train a head, and let it draft the next data, within `hours`; return the report.

    The run's folder also gets the conversations in `made`. After each portion, acceptance is measured, and the best
    head is saved and registered for the target. A resumed run continues in its current phase with its remaining time.

    `learning`, `reading`: tokens per second of learning, until the run has timed a step, and of capturing hidden
    states. Raises as `train`, and DataError if the target writes nothing usable.
    """
    journal, folder, watch = Journal.read(setup.folder), setup.folder, setup.watch
    watch.restart(journal.elapsed)
    result: Result | None = None
    try:
        with Bar(3600 * (setup.config.optimization.hours or 0.0), done=watch.elapsed) as bar:
            hours = Hours(setup, journal, bar, learning, reading)
            while (number := hours.following()) is not None:
                hours.make(number)
                result = hours.run.learn(hours.phase(number))
                hours.end_phase(number, result)
            return hours.finish(result)
    except Stopped as e:
        journal.write(folder, watch.elapsed)
        there = f"the best head so far is in {folder / BEST}; " if (folder / BEST).exists() else ""
        tqdm.write(f"{there}the data is kept; continue with: eagle-train --resume {folder}")
        e.args = ()  # the same command, which continues other files, does not continue a run
        raise


class Hours:
    """A run's portions of data, and the division of its time between making and learning them."""

    def __init__(self, setup: Setup, journal: Journal, bar: Bar, learning: float, reading: float):
        """Make prompts and the first portion unless they exist, and start or restore training."""
        self._setup, self._journal = setup, journal
        self._config, self._watch = setup.config, setup.watch
        self._bar, self._passes = bar, setup.config.optimization.epochs
        self._learning, self._reading = learning, reading
        self._total = 3600 * (setup.config.optimization.hours or 0.0)
        self._portions = Portions(setup.target, setup.config, setup.folder, setup.head)
        self._evaluation = EVALUATION * self._total  # seconds of the last measurement; before the first, its limit
        self._write()
        begun = self._watch.elapsed
        self._portions.make_prompts(lambda tokens, _: self._beat(0, tokens) >= begun + self._total / 100)
        if not journal.portions:
            journal.portions.append(Portion(self._watch.elapsed))
            self._write()
        self._make(0, self._first_limits(journal.portions[0]), setup.config.head.init_from or None)
        begun = self._watch.elapsed
        self.run = Run(setup, self._data(), self._portions.prompts.tokens, self._total, times=6)
        if setup.saved is None:
            self._evaluation = self._watch.elapsed - begun
        else:
            self._watch.restart(max(begun, setup.saved.state.elapsed))

    def finish(self, last: Result | None) -> dict[str, Any]:
        """Write the report, delete the hidden states, and tell if not all data was learned."""
        data, portions = self._data(), self._journal.portions
        names = ("tokens", "made_seconds", "acceptance_length")
        made = [{name: getattr(portion, name) for name in names} for portion in portions]
        facts = {**data.report, **self._facts(), "portions": made, "hours": round(self._watch.elapsed / 3600, 4)}
        batches, learned = self._setup.batches(data), set[Piece]()
        for number, portion in enumerate(portions):  # each from the data available at the time
            count = self._portions.conversations(number + bool(portion.tokens))
            first = self._portions.conversations(portion.fresh)
            learned |= batches.learned(portion.epoch, portion.until, count, first)
        report = self.run.finish(last.acceptance if last else None, batches, facts, learned)
        whole, used = report["data"]["tokens"], report["data"]["learned_tokens"]
        if used < whole:
            tqdm.write(
                f"the time was over before {whole - used:,} of the {whole:,} tokens were learned; the report and "
                "the card count only the others"
            )
        self._portions.remove_states(len(portions))
        return report

    @property
    def _left(self) -> float:
        """Seconds until the last measurement must begin; 1/500 of the time is for writing report and plots."""
        return self._total * (1 - 1 / 500) - self._evaluation - self._watch.elapsed

    def _data(self) -> TrainData:
        return self._portions.data(sum(1 for portion in self._journal.portions if portion.tokens))

    def following(self) -> int | None:
        """Return the number of the portion to continue with, or None after the last phase."""
        portions, now = self._journal.portions, self._watch.elapsed
        if portions[-1].acceptance_length is not None:
            if portions[-1].last:
                return None
            wanted, last = self._next_portion(self._left)
            portions.append(Portion(now, wanted, last, None if wanted else 0))
            self._write()
        return len(portions) - 1

    def _next_portion(self, left: float, learning: float = 0.0) -> tuple[int, bool]:
        """Return the `next_portion` if `left` seconds remain after `learning` more seconds of learning."""
        rates, progress = self._rates(), self.run.progress
        learned = progress.tokens + round(learning * rates.learned)
        cooldown = COOLDOWN * (progress.train_seconds + learning)
        return next_portion(left, self._journal.made, learned, self._passes, rates, cooldown)

    def _rates(self) -> Rates:
        """Return those of the latest portion and phase; before the first step, learning is as measured by a probe."""
        latest = self._journal.portions[::-1]
        made = next(portion for portion in latest if portion.tokens)
        rates = (portion.learned / max(portion.learned_seconds, 1e-9) for portion in latest if portion.learned)
        learned = next(rates, self._learning) or max(self.run.progress.tokens_per_second, 1e-3)
        return Rates((made.tokens or 0) / max(made.made_seconds, 1e-9), learned)

    def make(self, number: int) -> None:
        """Make a portion, or the rest of it."""
        try:
            self._make(number, self._limits(number), self._setup.folder / BEST)
        except DataError as e:
            tqdm.write(f"{e}; the rest of the time goes to learning from the existing data")
            portion = self._journal.portions[number]
            portion.tokens, portion.last = 0, True
            self._write()

    def _make(self, number: int, limits: MakeLimits, head: Path | str | None) -> None:
        portion = self._journal.portions[number]
        if portion.tokens is None:
            wanted = 0 if portion.last else portion.wanted
            portion.tokens = self._portions.make(number, wanted, limits, head)
            portion.made_seconds = self._watch.elapsed - portion.begun
            self._write()

    def _limits(self, number: int) -> MakeLimits:
        """Return the limits for making a portion, so that enough time remains to learn its tokens."""
        rates, learned = self._rates(), self.run.progress.tokens
        cooldown = max(COOLDOWN * self.run.progress.train_seconds, EVALUATION * self._total)
        fresh = self._journal.tokens(self._fresh(number), number)

        def left(tokens: int, coming: int = 0) -> float:
            """Return the seconds left for making data, if each of the portion's tokens is captured and learned."""
            self._beat(number, tokens)
            whole = tokens + coming
            repeat = seconds_to_learn(self._journal.made + whole, learned, self._passes, rates.learned)
            learning = max(repeat, (fresh + whole) / rates.learned, cooldown)
            return self._left - whole / self._reading - learning

        def enough(tokens: int, coming: int) -> bool:
            return left(tokens, coming) <= coming / 2 / rates.made  # half of the current conversations is written

        return MakeLimits(enough=enough, over=lambda tokens: left(tokens) <= 0)

    def _first_limits(self, portion: Portion) -> MakeLimits:
        """Return the limits for the first portion, which must not be empty. The learning speed is not known yet."""
        latest = self._watch.elapsed + LONGEST * self._left

        def enough(tokens: int, coming: int) -> bool:
            return self._beat(0, tokens) >= portion.begun + FIRST * self._total

        return MakeLimits(enough=enough, over=lambda tokens: self._beat(0, tokens) >= latest and tokens > 0)

    def phase(self, number: int) -> Phase:
        """Return the learning phase after a portion, over all data so far. The journal records it before it begins."""
        run, portion = self.run, self._journal.portions[number]
        batches = self._setup.batches(self._portions.data(number + bool(portion.tokens)))
        if portion.schedule is None:
            portion.schedule = self._schedule(number, batches.steps_per_epoch())
            portion.epoch = run.progress.epoch + bool(number)
            portion.fresh, portion.last = self._fresh(number), portion.schedule.last
            self._write()
        batches.put_first(portion.epoch, self._portions.conversations(portion.fresh))
        self._bar.bar.set_description_str(f"phase {number + 1} learns", refresh=False)
        return Phase(batches, portion.schedule, self._bar, portion.epoch)

    def end_phase(self, number: int, result: Result) -> None:
        """Save the state after a measured phase, and register the best head so far."""
        run, portion = self.run, self._journal.portions[number]
        assert portion.schedule is not None
        self._evaluation = self._watch.elapsed - result.until
        run.save_state()
        portion.learned = self.run.progress.tokens - sum(earlier.learned for earlier in self._journal.portions[:number])
        portion.learned_seconds = result.until - portion.schedule.begins
        portion.until = run.progress.epoch, run.progress.batch
        portion.acceptance_length = result.acceptance.acceptance_length
        self._write()
        self._register()

    def _register(self) -> None:
        folder = self._setup.folder
        if folder.resolve() == Path(self._config.run.output).resolve():
            name, mark, best = self._config.head.target, fingerprint(self._setup.target), self.run.best[1]
            tau = best.acceptance_length if self._facts()["prompts_held_out"] else None
            register(folder / BEST, name, "trained", mark, tau, best.prompts)

    def _facts(self) -> dict[str, Any]:
        return self._portions.prompts.facts(self._data().samples.keys)

    def _fresh(self, number: int) -> int:
        """Return the first portion that may not be completely learned before the phase of portion `number`."""
        if not number:
            return 0
        before = self._journal.portions[number - 1]
        return number if before.learned >= self._journal.tokens(before.fresh, number) else before.fresh

    def _schedule(self, number: int, steps_per_epoch: int) -> WarmupStableDecay:
        """Return the schedule of the phase after a portion, long enough for its share of the passes."""
        now, made, left = self._watch.elapsed, self._journal.made, max(0.0, self._left)
        last = self._journal.portions[number].last or self._is_last(number, left)
        # The learning rate always falls at the end, if necessary in the extra time of one measurement.
        longest = max(left, EVALUATION * self._total) if last else LONGEST * left
        count = max(1, round(max(0, self._passes * made - self.run.progress.tokens) / made * steps_per_epoch))
        until = 0 if last else self.run.progress.step + count
        return WarmupStableDecay(now, now + longest, until, self.run.progress.train_seconds, self._total, last)

    def _is_last(self, number: int, left: float) -> bool:
        """Return whether this is the last phase: with `left` seconds, no other portion could be made and learned."""
        if not number:
            return left * (1 - LONGEST) <= 2 * self._evaluation
        rest = seconds_to_learn(self._journal.made, self.run.progress.tokens, self._passes, self._rates().learned)
        seconds = min(rest, LONGEST * left)
        return not self._next_portion(left - seconds - self._evaluation, seconds)[0]

    def _beat(self, number: int, tokens: int) -> float:
        """Show how much of a portion is made. Return the elapsed seconds, which are journaled every `_BEAT` seconds."""
        elapsed = self._watch.elapsed
        if elapsed >= self._journal.elapsed + _BEAT:
            self._write()
        self._bar.bar.set_description_str(f"phase {number + 1} makes", refresh=False)
        self._bar.bar.set_postfix_str(f"{tokens:,} tokens", refresh=False)
        self._bar.show(elapsed)
        return elapsed

    def _write(self) -> None:
        self._journal.write(self._setup.folder, self._watch.elapsed)
