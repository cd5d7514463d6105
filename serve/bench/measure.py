"""Timing: every mode over the same prompts, in turns, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter

import mlx.core as mx

from eagle_mlx.errors import ConfigError
from eagle_mlx.progress import progress_bar
from eagle_mlx.sampling_params import Acceptance, SamplingParams
from eagle_mlx.target import Target
from eagle_mlx.text import LEAST_DISTINCT, is_loop

from ..prompts import Dialogue
from .decoding import (
    Continuation,
    Identity,
    Mode,
    Timed,
    acceptance_by_position,
    acceptance_length,
    compare,
    finish,
    take_turns,
    tolerance_for,
)
from .modes import BASELINES, EngineMode, MlxLmMode
from .report import Category, Run

GROUP_PER_ROW = 4
"""Prompts per row of the batch between two turns, so that rows that end early are filled again."""


@dataclass(frozen=True)
class BenchConfig:
    """What to measure, beside the modes. Raises ConfigError, with the field's name, for a value out of range."""

    max_tokens: int = 128
    temperature: float = 0.0
    repeats: int = 3
    seed: int = 0
    """Prompt i is sampled with seed + i where the temperature is above 0."""
    least_distinct: float = LEAST_DISTINCT
    """Prompts whose reference continuation has a smaller share of distinct 4-grams are left out of the figures."""
    acceptance: Acceptance = "coupled"
    """The rule by which sampled drafts are accepted. Only coupled texts can be compared with plain ones."""
    ignore_eos: bool = False
    """Let every continuation be `max_tokens` long."""
    turn: int = 0
    """Tokens a row after which the modes change over; 0: when all has been said to a group of prompts."""
    tolerance: float | None = None
    """How close the two best logits must be for a difference to be excused; None goes by the target's type."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.turn < 0:
            raise ConfigError(f"turn must be at least 0; got {self.turn}")
        if not 0 <= self.least_distinct <= 1:
            raise ConfigError(f"least_distinct must be between 0 and 1; got {self.least_distinct}")

    def params(self, count: int, max_tokens: int) -> list[SamplingParams]:
        seeds = [self.seed + index if self.temperature else None for index in range(count)]
        common = SamplingParams(
            self.temperature, max_tokens=max_tokens, ignore_eos=self.ignore_eos, acceptance=self.acceptance
        )
        return [replace(common, seed=seed) for seed in seeds]


@dataclass(frozen=True)
class _Work:
    """How each turn is decoded."""

    params: Sequence[SamplingParams]
    first: Sequence[SamplingParams]
    """The same, for one token only."""
    turn: int
    """As of the config."""

    def run(self, result: _Results, group: Sequence[int], first: bool = False) -> Timed:
        """Decode some of a mode's prompts, whole or to their first token: the seconds, and what was decoded."""
        params = self.first if first else self.params
        mx.clear_cache()  # every mode begins with no buffers of another's
        start = perf_counter()
        out = finish(result.mode.decode([result.prompts[index] for index in group], [params[index] for index in group]))
        seconds = perf_counter() - start
        result.mode.sync()
        return seconds, out

    def run_all(self, results: Sequence[_Results], group: Sequence[int]) -> list[Timed]:
        """The same by all modes: one after the other, or in turns."""
        if not self.turn:
            return [self.run(result, group) for result in results]
        jobs = [(result.mode, [result.prompts[index] for index in group]) for result in results]
        return take_turns(jobs, [self.params[index] for index in group], self.turn)


@dataclass(frozen=True)
class _Timing:
    """One group: prompts decoded together, all of them kept or none."""

    index: int
    """The first prompt of the group."""
    seconds: float
    first_token_seconds: float


@dataclass
class _Results:
    """What one mode was asked, what it decoded, and how long it took, repeat by repeat and group by group."""

    mode: Mode
    prompts: dict[int, list[int]] = field(default_factory=dict)
    continuations: dict[int, Continuation] = field(default_factory=dict)
    repeats: list[list[_Timing]] = field(default_factory=list)

    def outputs(self, indices: Iterable[int]) -> list[Continuation]:
        return [self.continuations[index] for index in indices]

    def seconds(self, kept: Sequence[int]) -> list[float]:
        """Of each repeat, over the groups that are kept."""
        return [sum(timing.seconds for timing in repeat if timing.index in kept) for repeat in self.repeats]

    def rates(self, kept: Sequence[int]) -> list[float]:
        """Tokens per second of each repeat."""
        tokens = sum(len(one.tokens) for one in self.outputs(kept))
        return [tokens / seconds for seconds in self.seconds(kept)]

    def decode_rates(self, kept: Sequence[int]) -> list[float]:
        """The same behind the first token of each prompt."""
        tokens = sum(len(one.tokens) - 1 for one in self.outputs(kept))
        spent = (
            sum(timing.seconds - timing.first_token_seconds for timing in repeat if timing.index in kept)
            for repeat in self.repeats
        )
        return [tokens / max(seconds, 1e-9) for seconds in spent]


@dataclass(frozen=True)
class _Turns:
    """All turns of all dialogues, by number: first all first turns, then all second ones."""

    target: Target
    dialogues: Sequence[Dialogue]
    places: Sequence[tuple[int, int]]
    """The dialogue of each turn, and which of its turns it is."""

    @classmethod
    def of(cls, target: Target, dialogues: Sequence[Dialogue]) -> _Turns:
        most = max(dialogue.turns for dialogue in dialogues)
        each = [(at, turn) for turn in range(most) for at, one in enumerate(dialogues) if turn < one.turns]
        return cls(target, dialogues, each)

    def category(self, index: int) -> str | None:
        return self.dialogues[self.places[index][0]].category

    def ask(self, result: _Results, indices: Sequence[int]) -> None:
        """Set a mode's prompts of these turns, with its own answers to those before them."""
        numbers = {place: number for number, place in enumerate(self.places)}
        for index in indices:
            at, turn = self.places[index]
            before = [result.continuations[numbers[at, earlier]].text for earlier in range(turn)]
            result.prompts[index] = self.dialogues[at].prompt(self.target, before)


def measure(
    target: Target,
    modes: Sequence[Mode],
    prompts: Sequence[list[int] | Dialogue],
    config: BenchConfig,
    progress: bool = True,
) -> list[Run]:
    """Time every mode on every prompt, `config.repeats` times, and compare their texts.

    The turns of a dialogue are asked one after the other, each mode's own answers in between. The reference is mlx-lm's
    greedy text; when sampling or ignoring ends, the plain engine's with the same seeds. Prompts on which it loops are
    decoded once, for the comparison alone, and what is asked behind them is not. Raises ConfigError where it loops on
    all of them.
    """
    if not prompts or not modes:
        raise ConfigError("there is nothing to measure: no prompts or no modes")
    if config.ignore_eos and any(mode.name in BASELINES for mode in modes):
        raise ConfigError("mlx-lm ends where the model does: leave its modes out, or --ignore-eos")
    turns = _Turns.of(target, [prompt if isinstance(prompt, Dialogue) else Dialogue(prompt) for prompt in prompts])
    count = len(turns.places)
    work = _Work(config.params(count, config.max_tokens), config.params(count, 1), config.turn)
    results = [_Results(mode) for mode in modes]
    reference = _reference(target, results, config)
    kept, over = list[int](), set[int]()
    for turn in range(1 + turns.places[-1][1]):
        asked = [index for index, (at, which) in enumerate(turns.places) if which == turn and at not in over]
        for result in results if reference in results else [*results, reference]:
            turns.ask(result, asked)
        if turn == 0:
            for result in results:
                work.run(result, [0])
        last = _decode(results, reference, turns, asked, work, config, progress)
        over |= {turns.places[index][0] for index in set(asked) - set(last)}
        kept += last
    return [
        replace(
            _figures(result, results, _identity(target, result, reference, work, config), kept, config),
            reference=_described(reference.mode),
            by_category=_by_category(result, results, turns, kept),
        )
        for result in results
    ]


def _decode(
    results: Sequence[_Results],
    reference: _Results,
    turns: _Turns,
    indices: Sequence[int],
    work: _Work,
    config: BenchConfig,
    progress: bool,
) -> list[int]:
    """Time every mode on some turns; those on which the reference does not loop."""
    modes = [result.mode for result in results]
    if reference not in results:
        for index in progress_bar(indices, desc="reference", unit="prompt", disable=not progress):
            reference.continuations[index] = work.run(reference, [index])[1][0]
        kept = _kept(reference, indices, config)
        others = [index for index in indices if index not in kept]
        groups = _groups(kept, modes, turns) + _groups(others, modes, turns)
        _repeat(results, groups, work, 0, config, progress)
    else:
        _repeat(results, _groups(indices, modes, turns), work, 0, config, progress)
        kept = _kept(reference, indices, config)
    for repeat in range(1, config.repeats):
        _repeat(results, _groups(kept, modes, turns), work, repeat, config, progress)
    return kept


def _reference(target: Target, results: Sequence[_Results], config: BenchConfig) -> _Results:
    """The result that the others are compared with: one of them, or one of its own.

    With one prompt at a time the first repeat can decode them all and the loops be set aside after it; in a batch
    the prompts that loop must be known before, so that they do not share rounds with the others.
    """
    name = "plain" if config.temperature or config.ignore_eos or target.is_sharded else "mlx-lm"
    found = next((result for result in results if result.mode.name == name and result.mode.batch == 1), None)
    if found is not None and all(result.mode.batch == 1 for result in results):
        return found
    return _Results(EngineMode("plain", target, batch=1) if name == "plain" else MlxLmMode(target))


def _kept(reference: _Results, indices: Iterable[int], config: BenchConfig) -> list[int]:
    """The prompts on which the reference does not loop."""
    kept = [i for i in indices if not is_loop(reference.continuations[i].tokens, config.least_distinct)]
    if not kept and min(indices, default=1) == 0:
        raise ConfigError(
            f"all {len(reference.continuations)} continuations loop "
            f"(distinct 4-grams under {config.least_distinct:g}), so no figure means anything; "
            "take other prompts or a better target"
        )
    return kept


def _groups(indices: Sequence[int], modes: Sequence[Mode], turns: _Turns) -> list[Sequence[int]]:
    """The prompts between two turns: one, or enough of a category to keep the widest batch filled."""
    widest = max(mode.batch for mode in modes)
    size = 1 if widest == 1 else GROUP_PER_ROW * widest
    categories = dict.fromkeys(turns.category(index) for index in indices)
    alike = [[index for index in indices if turns.category(index) == each] for each in categories]
    return [some[start : start + size] for some in alike for start in range(0, len(some), size)]


def _repeat(
    results: Sequence[_Results],
    groups: Sequence[Sequence[int]],
    work: _Work,
    repeat: int,
    config: BenchConfig,
    progress: bool,
) -> None:
    """One pass over the groups; within a group the modes take turns, so that all meet the same moments."""
    for result in results:
        if len(result.repeats) == repeat:
            result.repeats.append([])
    title = f"repeat {repeat + 1}/{config.repeats}"
    with progress_bar(total=sum(map(len, groups)), desc=title, unit="prompt", disable=not progress) as bar:
        for number, group in enumerate(groups):
            start = number % len(results)
            ordered = [*results[start:], *results[:start]]
            firsts = [work.run(result, group, first=True)[0] for result in ordered]
            timed = work.run_all(ordered, group)
            for result, first, (seconds, out) in zip(ordered, firsts, timed, strict=True):
                result.repeats[repeat].append(_Timing(group[0], seconds, first))
                result.continuations.update(zip(group, out, strict=True))
            bar.update(len(group))


def _figures(
    result: _Results, results: Sequence[_Results], identity: Identity | None, kept: Sequence[int], config: BenchConfig
) -> Run:
    rates, continuations = result.rates(kept), result.outputs(kept)
    by_mode = {(other.mode.name, other.mode.batch): other for other in results}
    return Run(
        mode=result.mode.name,
        batch=result.mode.batch,
        depth=result.mode.depth,
        nodes=result.mode.nodes,
        policy=result.mode.policy,
        temperature=config.temperature,
        tokens_per_second=median(rates),
        decode_tokens_per_second=median(result.decode_rates(kept)),
        ratio_to_mlx_lm=_ratio(result, by_mode.get(("mlx-lm", 1)), kept),
        ratio_to_mlx_lm_batch=_ratio(result, by_mode.get(("mlx-lm-batch", result.mode.batch)), kept),
        ratio_to_plain=_ratio(result, by_mode.get(("plain", result.mode.batch)), kept),
        acceptance_length=acceptance_length(continuations),
        acceptance_by_position=acceptance_by_position(continuations),
        identical=identity.holds if identity else None,
        identical_count=identity.identical if identity else None,
        excused=identity.excused if identity else None,
        prompts=len(kept),
        left_out_looping=len(result.continuations) - len(kept),
        tokens=sum(len(one.tokens) for one in continuations),
        seconds=median(result.seconds(kept)),
        model=result.mode.model,
        dtype=type_name(result.mode.dtype),
    )


def type_name(dtype: mx.Dtype) -> str:
    """Return a type as NumPy names it, such as `bfloat16`."""
    return str(dtype).rpartition(".")[2]


def _described(mode: Mode) -> str:
    return f"{mode.name}, {mode.model} in {type_name(mode.dtype)}"


def _by_category(
    result: _Results, results: Sequence[_Results], turns: _Turns, kept: Sequence[int]
) -> tuple[Category, ...]:
    """The figures of each category, where the prompts have categories."""
    mlx_lm = next((other for other in results if other.mode.name == "mlx-lm"), None)
    found = []
    for name in dict.fromkeys(turns.category(index) for index in sorted(result.continuations)):
        if name is None:
            continue
        own = [index for index in kept if turns.category(index) == name]
        said = sum(turns.category(index) == name for index in result.continuations)
        found.append(
            Category(
                name=name,
                prompts=len(own),
                left_out_looping=said - len(own),
                tokens_per_second=median(result.rates(own)) if own else None,
                ratio_to_mlx_lm=_ratio(result, mlx_lm, own) if own else None,
                acceptance_length=acceptance_length(result.outputs(own)) if own else None,
            )
        )
    return tuple(found)


def _ratio(result: _Results, baseline: _Results | None, kept: Sequence[int]) -> float | None:
    """How much faster one is than the other: repeat by repeat, then the median."""
    if baseline is None:
        return None
    return median(mine / its for mine, its in zip(result.rates(kept), baseline.rates(kept), strict=True))


def _identity(
    target: Target, result: _Results, reference: _Results, work: _Work, config: BenchConfig
) -> Identity | None:
    """Over all prompts, those left out included; None for mlx-lm's sampling and batches, and for other rules.

    Behind a first difference a mode's own answer is another, and so is its next prompt: that turn counts as excused,
    since the difference before it was judged.
    """
    name = result.mode.name
    sampled = config.temperature > 0
    if name == "mlx-lm-batch" or (
        sampled and (name in BASELINES or (config.acceptance != "coupled" and name != "plain"))
    ):
        return None
    same = [index for index, prompt in sorted(result.prompts.items()) if reference.prompts[index] == prompt]
    expected, tokens = ([one.tokens for one in each.outputs(same)] for each in (reference, result))
    prompts, params = [result.prompts[index] for index in same], [work.params[index] for index in same]
    tolerance = max(tolerance_for(target), tolerance_for(result.mode))
    if config.tolerance is not None:
        tolerance = config.tolerance
    identity = compare(target, prompts, expected, tokens, params, tolerance)
    return replace(identity, excused=identity.excused + len(result.prompts) - len(same))
