"""Time every mode on the same prompts, in turns, and compute the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from eagle_mlx import Output, Target
from eagle_mlx.errors import ConfigError
from eagle_mlx.progress import counted, progress_bar, show_step
from eagle_mlx.text import is_loop

from ..memory_options import MemoryOptions
from ..prompts import Question
from . import decoding
from .modes import BenchModels, EngineMode, MlxLmMode
from .options import BASELINES, BenchConfig
from .report import BenchRun, Category

GROUP_PER_ROW = 4
"""Prompts per row of the batch in one turn. Rows that end early are filled with further prompts."""


Place = tuple[int, int]
"""The number of a question, and of one of its turns."""


@dataclass
class _Results:
    mode: decoding.Mode
    prompts: dict[Place, list[int]] = field(default_factory=dict)
    continuations: dict[Place, Output] = field(default_factory=dict)
    times: list[dict[Place, tuple[float, float]]] = field(default_factory=list)
    """For each repeat: (seconds, seconds to the first token) of each group, by the group's first prompt."""
    peak: int = 0

    def outputs(self, places: Iterable[Place]) -> list[Output]:
        return [self.continuations[place] for place in places]

    def seconds(self, kept: Sequence[Place]) -> list[float]:
        """Return the seconds of each repeat over the kept groups."""
        return [sum(whole for place, (whole, _) in repeat.items() if place in kept) for repeat in self.times]

    def rates(self, kept: Sequence[Place]) -> list[float]:
        """Return the tokens per second of each repeat."""
        tokens = sum(len(one.tokens) for one in self.outputs(kept))
        return [tokens / max(seconds, 1e-9) for seconds in self.seconds(kept)]

    def decode_rate(self, kept: Sequence[Place]) -> float | None:
        """Return the tokens per second without the first tokens and the time to them: the median of the repeats.

        None if the answers are too short to tell: the two times are measured apart, so the first may be the longer one.
        """
        tokens = sum(len(one.tokens) - 1 for one in self.outputs(kept))
        rest = median(
            sum(whole - first for place, (whole, first) in repeat.items() if place in kept) for repeat in self.times
        )
        return tokens / rest if rest > 0 and tokens else None

    def prompt_rate(self, kept: Sequence[Place]) -> float:
        """Return the prompt tokens per second, up to the first new tokens: the median of the repeats."""
        firsts = [sum(first for place, (_, first) in repeat.items() if place in kept) for repeat in self.times]
        return sum(len(self.prompts[place]) for place in kept) / max(median(firsts), 1e-9)

    def ratio_to(self, baseline: _Results | None, kept: Sequence[Place]) -> float | None:
        """Return the speedup over a baseline: the median of the repeats' ratios."""
        if baseline is None:
            return None
        return median(mine / its for mine, its in zip(self.rates(kept), baseline.rates(kept), strict=True))


def measure(
    target: Target,
    modes: Sequence[decoding.Mode],
    prompts: Sequence[Sequence[int] | Question],
    config: BenchConfig,
    progress: bool = True,
) -> list[BenchRun]:
    """Time every mode on every prompt, `config.repeats` times, and compare their texts.

    The reference is mlx-lm's greedy text, or plain decoding with the same seeds if sampled, exact, or with ends
    ignored. If it loops on a prompt, the prompt is decoded once, for the comparison only, and its later turns are
    skipped. Raises ConfigError if all prompts loop, and PromptError if a question's last turn may not fit the context.
    """
    if not prompts or not modes:
        raise ConfigError("there is nothing to measure: no prompts or no modes")
    config.check([mode.name for mode in modes])
    questions = [prompt if isinstance(prompt, Question) else Question(prompt) for prompt in prompts]
    for question in questions:
        question.check(target, config.max_tokens)
    return _Measurement(target, modes, questions, config, progress).run()


class _Measurement:
    """All turns of all questions: first all first turns, then all second ones."""

    def __init__(
        self,
        target: Target,
        modes: Sequence[decoding.Mode],
        questions: Sequence[Question],
        config: BenchConfig,
        progress: bool,
    ):
        self.target, self.questions, self.config, self.progress = target, questions, config, progress
        self.turns = range(1 + max(len(question.later) for question in questions))
        places = [(at, turn) for turn in self.turns for at, one in enumerate(questions) if turn <= len(one.later)]
        self.params = dict(zip(places, config.params(len(places), config.max_tokens), strict=True))
        self.results = [_Results(mode) for mode in modes]
        self.reference = self._reference()

    def run(self) -> list[BenchRun]:
        kept, over = list[Place](), set[int]()
        for turn in self.turns:
            asked = [(at, which) for at, which in self.params if which == turn and at not in over]
            for result in [*self.results, self.reference]:
                self._ask(result, asked)
            if turn == 0:
                with self._bar("warm-up", len(self.results), "mode") as bar:
                    for result in self.results:
                        self._decode([result], [(0, 0)], bar)
                        bar.update()
            last = self._time(asked)
            over |= {at for at, _ in set(asked) - set(last)}
            kept += last
        with self._bar("comparison", len(self.results), "mode") as bar:
            runs = []
            for result in self.results:
                show_step(bar, result.mode.name, first=True)
                runs.append(self._figures(result, kept))
                bar.update()
        return runs

    def _reference(self) -> _Results:
        config, target = self.config, self.target
        exact = any(isinstance(result.mode, EngineMode) and result.mode.engine.exact for result in self.results)
        if config.temperature or config.ignore_eos or target.is_sharded or exact:
            return _Results(EngineMode("plain", BenchModels(target, memory=MemoryOptions(exact=exact)), 1))
        return _Results(MlxLmMode(target))

    def _ask(self, result: _Results, places: Sequence[Place]) -> None:
        for at, turn in places:
            before = [result.continuations[at, earlier].text for earlier in range(turn)]
            result.prompts[at, turn] = self.questions[at].encode(self.target, before)

    def _bar(self, title: str, total: int, unit: str) -> tqdm[Any]:
        return progress_bar(total=total, desc=title, unit=unit, disable=not self.progress)

    def _decode(
        self, results: Sequence[_Results], group: Sequence[Place], bar: tqdm[Any], first: bool = False
    ) -> list[decoding.Timed]:
        """Decode some prompts by several modes, to the end or to the first token. The bar shows the active mode."""

        def watch(mode: decoding.Mode, tokens: int) -> None:
            show_step(bar, f"{mode.name}: {counted(tokens, 'token')}", first=not tokens)

        params = [replace(self.params[place], max_tokens=1) if first else self.params[place] for place in group]
        jobs = [(result.mode, [result.prompts[place] for place in group]) for result in results]
        return decoding.take_turns(jobs, params, 0 if first else self.config.turn, watch)

    def _time(self, places: Sequence[Place]) -> list[Place]:
        """Time every mode on some turns. Return those on which the reference does not loop."""
        with self._bar("reference", len(places), "prompt") as bar:
            for place in places:
                self.reference.continuations[place] = self._decode([self.reference], [place], bar)[0].outputs[0]
                bar.update()
        kept = self._kept(places)
        self._repeat(0, self._groups(kept) + self._groups([place for place in places if place not in kept]))
        for repeat in range(1, self.config.repeats):
            self._repeat(repeat, self._groups(kept))
        return kept

    def _kept(self, places: Sequence[Place]) -> list[Place]:
        said, least = self.reference.continuations, self.config.least_distinct
        kept = [place for place in places if not is_loop(said[place].tokens, least)]
        if not kept and (0, 0) in places:
            raise ConfigError(
                f"all {len(said)} continuations loop (their share of distinct 4-grams is below {least:g}), so there is "
                "nothing to measure; use other prompts or a better target"
            )
        return kept

    def _groups(self, places: Sequence[Place]) -> list[Sequence[Place]]:
        """Return groups of prompts, one per turn: a single prompt, or enough of one category for the widest batch."""
        widest = max(result.mode.batch for result in self.results)
        size = 1 if widest == 1 else GROUP_PER_ROW * widest
        alike: dict[str | None, list[Place]] = {}
        for place in places:
            alike.setdefault(self.questions[place[0]].category, []).append(place)
        return [some[start : start + size] for some in alike.values() for start in range(0, len(some), size)]

    def _repeat(self, repeat: int, groups: Sequence[Sequence[Place]]) -> None:
        """Time one pass over the groups. Modes take turns in each group, because the machine's speed varies."""
        for result in self.results:
            if len(result.times) == repeat:
                result.times.append({})
        title = f"repeat {repeat + 1}/{self.config.repeats}"
        with self._bar(title, sum(map(len, groups)), "prompt") as bar:
            for number, group in enumerate(groups):
                start = number % len(self.results)
                ordered = [*self.results[start:], *self.results[:start]]
                firsts = self._decode(ordered, group, bar, first=True)
                timed = self._decode(ordered, group, bar)
                for result, first, whole in zip(ordered, firsts, timed, strict=True):
                    result.times[repeat][group[0]] = whole.seconds, first.seconds
                    result.peak = max(result.peak, first.peak, whole.peak)
                    result.continuations.update(zip(group, whole.outputs, strict=True))
                bar.update(len(group))

    def _figures(self, result: _Results, kept: Sequence[Place]) -> BenchRun:
        mode, said, identity = result.mode, result.outputs(kept), self._identity(result)
        reference = self.reference.mode
        by_mode = {(other.mode.name, other.mode.batch): other for other in self.results}
        mlx_lm, plain = by_mode.get(("mlx-lm", 1)), by_mode.get(("plain", mode.batch))
        return BenchRun(
            mode=mode.name,
            batch=mode.batch,
            depth=mode.depth,
            nodes=mode.nodes,
            policy=mode.policy,
            temperature=self.config.temperature,
            tokens_per_second=median(result.rates(kept)),
            decode_tokens_per_second=result.decode_rate(kept),
            ratio_to_mlx_lm=result.ratio_to(mlx_lm, kept),
            ratio_to_mlx_lm_batch=result.ratio_to(by_mode.get(("mlx-lm-batch", mode.batch)), kept),
            ratio_to_plain=result.ratio_to(plain, kept),
            acceptance_length=decoding.acceptance_length(said),
            acceptance_by_position=decoding.acceptance_by_position(said),
            identical=identity.different == 0 if identity else None,
            identical_count=identity.identical if identity else None,
            excused=identity.excused if identity else None,
            prompts=len(kept),
            left_out_looping=len(result.continuations) - len(kept),
            tokens=sum(len(one.tokens) for one in said),
            seconds=median(result.seconds(kept)),
            by_category=self._by_category(result, mlx_lm, plain, kept),
            model=mode.model,
            dtype=type_name(mode.dtype),
            reference=f"{reference.name}, {reference.model} in {type_name(reference.dtype)}",
            prompt_tokens_per_second=result.prompt_rate(kept),
            acceptance_rate=decoding.acceptance_rate(said),
            peak_bytes=result.peak,
        )

    def _by_category(
        self, result: _Results, mlx_lm: _Results | None, plain: _Results | None, kept: Sequence[Place]
    ) -> tuple[Category, ...]:
        found = []
        for name, count in Counter(self.questions[at].category for at, _ in sorted(result.continuations)).items():
            own = [place for place in kept if self.questions[place[0]].category == name]
            figures: tuple[float | None, ...] = (None, None, None, None)
            if own:
                tau = decoding.acceptance_length(result.outputs(own))
                ratios = result.ratio_to(mlx_lm, own), tau, result.ratio_to(plain, own)
                figures = (median(result.rates(own)), *ratios)
            if name is not None:
                found.append(Category(name, len(own), count - len(own), *figures))
        return tuple(found)

    def _identity(self, result: _Results) -> decoding.TextComparison | None:
        """Compare all texts, including left-out prompts. None for mlx-lm's sampling and batches, and for other rules.

        After a difference, the prompts of later turns differ too. They are excused: the difference counts once.
        """
        name, config = result.mode.name, self.config
        draws_differ = name in BASELINES or (config.acceptance != "coupled" and name != "plain")
        if name == "mlx-lm-batch" or (config.temperature > 0 and draws_differ):
            return None
        same = [place for place, prompt in sorted(result.prompts.items()) if self.reference.prompts[place] == prompt]
        tolerance = max(decoding.tolerance_for(self.target), decoding.tolerance_for(result.mode))
        identity = decoding.compare(
            self.target,
            [result.prompts[place] for place in same],
            [one.tokens for one in self.reference.outputs(same)],
            [one.tokens for one in result.outputs(same)],
            [self.params[place] for place in same],
            tolerance if config.tolerance is None else config.tolerance,
        )
        return replace(identity, excused=identity.excused + len(result.prompts) - len(same))


def type_name(dtype: mx.Dtype) -> str:
    """Return a type as NumPy names it, such as `bfloat16`."""
    return str(dtype).rpartition(".")[2]
