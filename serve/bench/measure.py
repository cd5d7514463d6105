"""Time every mode on the same prompts, in turns, compare the texts, and compute the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from eagle_mlx import Output, SamplingParams, Target
from eagle_mlx.cache import RaggedCache
from eagle_mlx.decoding.sampling import SamplingBatch, gumbel
from eagle_mlx.errors import ConfigError
from eagle_mlx.progress import counted, progress_bar, show_step
from eagle_mlx.text import is_loop

from ..prompts import Question
from ..speculation import MemoryOptions
from .modes import BenchModels, EngineMode, MlxLmMode, Mode, Timed, take_turns
from .options import BASELINES, BenchConfig
from .report import BenchRun, Category, TextComparison

GROUP_PER_ROW = 4  # Prompts per row of the batch in one turn. Rows that end early are filled with further prompts.


def acceptance_length(outputs: Sequence[Output]) -> float:
    """Return τ over all outputs: tokens emitted per target forward, bonus tokens included."""
    return sum(len(output.tokens) for output in outputs) / max(1, sum(output.rounds for output in outputs))


def acceptance_by_position(outputs: Sequence[Output]) -> list[float]:
    """For each draft position, return the share of rounds that accepted it among those that drafted it."""
    drafted = map(sum, zip_longest(*(output.drafted_by_position for output in outputs), fillvalue=0))
    accepted = map(sum, zip_longest(*(output.accepted_by_position for output in outputs), fillvalue=0))
    return [hits / count for hits, count in zip_longest(accepted, drafted, fillvalue=0) if count]


# Larger than a forward's rounding errors, and much smaller than real differences. In float32 with OpenBLAS, logits of
# one token and of eight differ by up to 3e-5. For 16-bit types: two steps between logits of 8 and 16.
TOLERANCES = {mx.float32: 1e-3, mx.float16: 0.016, mx.bfloat16: 0.125}


def tolerance_for(target: Target) -> float:
    """Return how close two logits must be for rounding in the target's type to decide between them."""
    return TOLERANCES.get(target.dtype, 1e-3)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the first index at which two continuations differ, or at which one ends; None if they are equal."""
    return next((index for index, (left, right) in enumerate(zip_longest(a, b)) if left != right), None)


def compare(
    target: Target,
    prompts: Sequence[list[int]],
    reference: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    kv_bits: int | None = None,
) -> TextComparison:
    """Count the continuations that are equal to the reference's, differ by rounding, or differ otherwise. `kv_bits`: of
    the KV caches that they were decoded with."""
    identical = excused = 0
    for prompt, expected, actual, own in zip(prompts, reference, tokens, params, strict=True):
        at = first_difference(expected, actual)
        if at is None:
            identical += 1
        elif at < min(len(expected), len(actual)):
            candidates = {expected[at], actual[at]}
            excused += _is_near_tie(target, [*prompt, *expected[:at]], candidates, own, kv_bits)
    return TextComparison(identical, excused, len(prompts) - identical - excused)


def _is_near_tie(
    target: Target, tokens: list[int], candidates: set[int], params: SamplingParams, kv_bits: int | None
) -> bool:
    """Return whether both candidates' scores (logits + temperature x noise) are within the tolerance of the best."""
    cache = RaggedCache.of(target.model, 1, kv_bits)
    scores = target.forward(mx.array([tokens], mx.int32), cache).logits[:, -1:].astype(mx.float32)
    if params.rule != "greedy":
        batch = SamplingBatch.of([params], [params.seed or 0])
        position = mx.array([[len(tokens)]], mx.int32)
        scores = scores + params.temperature * gumbel(batch, position, scores.shape[-1])
    by_token = np.array(scores[0, 0])
    return all(by_token.max() - by_token[candidate] < tolerance_for(target) for candidate in candidates)


Place = tuple[int, int]  # the number of a question, and of one of its turns


@dataclass
class _Results:
    mode: Mode
    prompts: dict[Place, list[int]] = field(default_factory=dict)
    continuations: dict[Place, Output] = field(default_factory=dict)
    times: list[dict[Place, tuple[float, float]]] = field(default_factory=list)
    """For each repeat: (seconds, seconds to the first token) of each group, by the group's first prompt."""
    peak: int = 0

    def outputs(self, places: Iterable[Place]) -> list[Output]:
        return [self.continuations[place] for place in places]

    def seconds(self, kept: Sequence[Place]) -> Any:
        """Return the seconds of the kept groups, whole and to the first tokens: float64 [2, repeats]."""
        return np.array([[repeat[place] for place in repeat if place in kept] for repeat in self.times]).sum(axis=1).T

    def rates(self, kept: Sequence[Place]) -> Any:
        """Return the tokens per second of each repeat: float64 [repeats]."""
        return sum(len(output.tokens) for output in self.outputs(kept)) / self.seconds(kept)[0].clip(1e-9)

    def ratio_to(self, baseline: _Results | None, kept: Sequence[Place]) -> float | None:
        return None if baseline is None else float(np.median(self.rates(kept) / baseline.rates(kept)))


def measure(
    target: Target,
    modes: Sequence[Mode],
    prompts: Sequence[Sequence[int] | Question],
    config: BenchConfig,
    progress: bool = True,
) -> list[BenchRun]:
    """Time every mode on every prompt, `config.repeats` times, and compare their texts.

    The reference is mlx-lm's greedy text, that of the first repeat if mlx-lm is measured and no mode decodes a batch.
    It is plain decoding with the same seeds if sampled, exact, or with ends ignored. A prompt on which it loops is
    decoded once, for the comparison only, and later turns of its question are skipped. Raises ConfigError if all
    prompts loop, and PromptError if a question's last turn may not fit the context.
    """
    if not prompts or not modes:
        raise ConfigError("there is nothing to measure: no prompts or no modes")
    if config.ignore_eos and any(mode.name in BASELINES for mode in modes):
        raise ConfigError("mlx-lm cannot ignore the end of text; leave out its modes, or --ignore-eos")
    questions = [prompt if isinstance(prompt, Question) else Question(prompt) for prompt in prompts]
    for question in questions:
        question.check(target, config.max_tokens)
    turns = range(1 + max(len(question.later) for question in questions))
    places = [(at, turn) for turn in turns for at, question in enumerate(questions) if turn <= len(question.later)]
    exact = any(isinstance(mode, EngineMode) and mode.engine.exact for mode in modes)
    if config.temperature or config.ignore_eos or target.ranks > 1 or exact:
        reference: Mode = EngineMode("plain", BenchModels(target, memory=MemoryOptions(exact=exact)), 1)
    else:
        reference = MlxLmMode("mlx-lm", target)
    return _Measurement(
        target,
        questions,
        config,
        dict(zip(places, config.params(len(places), config.max_tokens), strict=True)),
        list(map(_Results, modes)),
        _Results(reference),
        partial(progress_bar, disable=not progress),
    ).run()


@dataclass(frozen=True)
class _Measurement:
    """All turns of all questions: first all first turns, then all second ones."""

    target: Target
    questions: Sequence[Question]
    config: BenchConfig
    params: dict[Place, SamplingParams]
    results: list[_Results]
    reference: _Results
    bar: Callable[..., tqdm[Any]]

    @property
    def _widest(self) -> int:
        return max(result.mode.batch for result in self.results)

    def run(self) -> list[BenchRun]:
        kept, over = list[Place](), set[int]()
        for turn in sorted({turn for _, turn in self.params}):
            places = [(at, which) for at, which in self.params if which == turn and at not in over]
            for result in [*self.results, self.reference]:
                for place in places:
                    before = [result.continuations[place[0], earlier].text for earlier in range(turn)]
                    result.prompts[place] = self.questions[place[0]].encode(self.target, before)
            if turn == 0:
                with self.bar(desc="warm-up", total=len(self.results), unit="mode") as bar:
                    for result in self.results:
                        self._decode([result], [(0, 0)], bar)
                        bar.update()
            last = self._time(places)
            over |= {at for at, _ in set(places) - set(last)}
            kept += last
        with self.bar(desc="comparison", total=len(self.results), unit="mode") as bar:
            runs = []
            for result in self.results:
                show_step(bar, result.mode.name, first=True)
                runs.append(self._figures(result, kept))
                bar.update()
        return runs

    def _decode(
        self, results: Sequence[_Results], group: Sequence[Place], bar: tqdm[Any], first: bool = False
    ) -> list[Timed]:
        """Decode some prompts by several modes, to the end or to the first token. The bar shows the active mode."""

        def watch(mode: Mode, tokens: int) -> None:
            show_step(bar, f"{mode.name}: {counted(tokens, 'token')}", first=not tokens)

        params = [replace(self.params[place], max_tokens=1) if first else self.params[place] for place in group]
        jobs = [(result.mode, [result.prompts[place] for place in group]) for result in results]
        return take_turns(jobs, params, 0 if first else self.config.turn, watch)

    def _time(self, places: Sequence[Place]) -> list[Place]:
        """Time every mode on some turns. Return those on which the reference does not loop."""
        texts, least = self.reference.continuations, self.config.least_distinct
        alike = (result for result in self.results if result.mode.name == self.reference.mode.name == "mlx-lm")
        timed = next(alike, None) if self._widest == 1 else None
        if timed is not None:
            self._repeat(0, self._groups(places))
            texts.update(timed.continuations)
        else:
            with self.bar(desc="reference", total=len(places), unit="prompt") as bar:
                for place in places:
                    texts[place] = self._decode([self.reference], [place], bar)[0].outputs[0]
                    bar.update()
        kept = [place for place in places if not is_loop(texts[place].tokens, least)]
        if not kept and (0, 0) in places:
            raise ConfigError(
                f"all {len(texts)} continuations loop (their share of distinct 4-grams is below {least:g}), so there "
                "is nothing to measure; use other prompts or a better target"
            )
        if timed is None:
            self._repeat(0, self._groups(kept) + self._groups([place for place in places if place not in kept]))
        for repeat in range(1, self.config.repeats):
            self._repeat(repeat, self._groups(kept))
        return kept

    def _groups(self, places: Sequence[Place]) -> list[Sequence[Place]]:
        """Return groups of prompts, one per turn: a single prompt, or enough of one category for the widest batch."""
        size = 1 if self._widest == 1 else GROUP_PER_ROW * self._widest
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
        with self.bar(desc=title, total=sum(map(len, groups)), unit="prompt") as bar:
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
        mode, outputs, identity = result.mode, result.outputs(kept), self._identity(result)
        by_mode = {(other.mode.name, other.mode.batch): other for other in self.results}
        mlx_lm, plain = by_mode.get(("mlx-lm", 1)), by_mode.get(("plain", mode.batch))
        tokens = sum(len(output.tokens) for output in outputs)
        drafted = sum(output.drafted for output in outputs)
        whole, first = result.seconds(kept)
        # The two times are measured apart, so the first may be the longer one if answers are short.
        later, later_seconds = tokens - len(kept), float(np.median(whole - first))
        prompt_tokens = sum(len(result.prompts[place]) for place in kept)
        return BenchRun(
            mode=mode.name,
            batch=mode.batch,
            depth=mode.depth,
            nodes=mode.nodes,
            policy=mode.policy,
            temperature=self.config.temperature,
            tokens_per_second=float(np.median(result.rates(kept))),
            decode_tokens_per_second=later / later_seconds if later and later_seconds > 0 else None,
            ratio_to_mlx_lm=result.ratio_to(mlx_lm, kept),
            ratio_to_mlx_lm_batch=result.ratio_to(by_mode.get(("mlx-lm-batch", mode.batch)), kept),
            ratio_to_plain=result.ratio_to(plain, kept),
            acceptance_length=acceptance_length(outputs),
            acceptance_by_position=acceptance_by_position(outputs),
            identical=identity.different == 0 if identity else None,
            identical_count=identity.identical if identity else None,
            excused=identity.excused if identity else None,
            prompts=len(kept),
            left_out_looping=len(result.continuations) - len(kept),
            tokens=tokens,
            seconds=float(np.median(whole)),
            by_category=self._by_category(result, mlx_lm, plain, kept),
            reference=self.reference.mode.name,
            prompt_tokens_per_second=prompt_tokens / max(float(np.median(first)), 1e-9),
            acceptance_rate=sum(output.accepted for output in outputs) / drafted if drafted else None,
            peak_bytes=result.peak,
        )

    def _by_category(
        self, result: _Results, mlx_lm: _Results | None, plain: _Results | None, kept: Sequence[Place]
    ) -> tuple[Category, ...]:
        categories = []
        for name, count in Counter(self.questions[at].category for at, _ in sorted(result.continuations)).items():
            own = [place for place in kept if self.questions[place[0]].category == name]
            if name is None:
                continue
            category = Category(name, len(own), count - len(own), None, None, None)
            if own:
                speed, tau = float(np.median(result.rates(own))), acceptance_length(result.outputs(own))
                ratios = result.ratio_to(mlx_lm, own), tau, result.ratio_to(plain, own)
                category = Category(name, len(own), count - len(own), speed, *ratios)
            categories.append(category)
        return tuple(categories)

    def _identity(self, result: _Results) -> TextComparison | None:
        """Compare all texts, including left-out prompts. None for mlx-lm's sampling and batches, and for other rules.

        After a difference, the prompts of later turns differ too. They are excused: the difference counts once.
        """
        name, config = result.mode.name, self.config
        draws_differ = name in BASELINES or (config.acceptance != "coupled" and name != "plain")
        if name == "mlx-lm-batch" or (config.temperature > 0 and draws_differ):
            return None
        same = [place for place, prompt in sorted(result.prompts.items()) if self.reference.prompts[place] == prompt]
        identity = compare(
            self.target,
            [result.prompts[place] for place in same],
            [output.tokens for output in self.reference.outputs(same)],
            [output.tokens for output in result.outputs(same)],
            [self.params[place] for place in same],
        )
        return replace(identity, excused=identity.excused + len(result.prompts) - len(same))
