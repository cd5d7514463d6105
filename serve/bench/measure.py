"""Timing: every mode over the same prompts, in turns, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from time import perf_counter

import mlx.core as mx

from eagle_mlx.decoding.loops import LEAST_DISTINCT, is_loop
from eagle_mlx.errors import ConfigError
from eagle_mlx.progress import progress_bar
from eagle_mlx.sampling_params import Acceptance, SamplingParams
from eagle_mlx.target import Target

from .baselines import MlxLmMode
from .continuation import Continuation, acceptance_by_position, acceptance_length, finish
from .identity import Identity, compare, tolerance_for
from .modes import BASELINES, EngineMode, Mode
from .turns import Timed, take_turns

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
class Run:
    """The figures of one mode, over the prompts that do not loop."""

    mode: str
    batch: int
    depth: int
    nodes: int
    """Tokens of a draft tree; 0 for chains."""
    policy: str
    """How many of `depth` tokens are drafted: `fixed` for all."""
    temperature: float
    tokens_per_second: float
    """Generated tokens over wall time, reading the prompts included; median over the repeats."""
    decode_tokens_per_second: float
    """The same without the time to the first token and without that token."""
    ratio_to_mlx_lm: float | None
    """Of tokens_per_second, repeat by repeat, then the median; None where mlx-lm was not measured."""
    ratio_to_mlx_lm_batch: float | None
    """The same against mlx-lm's batches of this size."""
    ratio_to_plain: float | None
    """The same against the engine's own plain decoding at this batch size."""
    acceptance_length: float
    acceptance_by_position: list[float]
    identical: bool | None
    """No difference from the reference that rounding does not excuse; None for mlx-lm's own sampling and batches."""
    identical_count: int | None
    excused: int | None
    prompts: int
    """Prompts that the figures are taken over; identity is judged on those left out, too."""
    left_out_looping: int
    tokens: int
    """Generated in one repeat."""
    seconds: float
    """Of one repeat; median."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class _Work:
    """The prompts, and how each is decoded."""

    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]
    first: Sequence[SamplingParams]
    """The same, for one token only."""
    turn: int
    """As of the config."""

    def run(self, mode: Mode, group: Sequence[int], first: bool = False) -> Timed:
        """Decode some of the prompts, whole or to their first token: the seconds, and what was decoded."""
        params = self.first if first else self.params
        mx.clear_cache()  # every mode begins with no buffers of another's
        start = perf_counter()
        out = finish(mode.decode([self.prompts[index] for index in group], [params[index] for index in group]))
        seconds = perf_counter() - start
        mode.sync()
        return seconds, out

    def run_all(self, modes: Sequence[Mode], group: Sequence[int]) -> list[Timed]:
        """The same by all modes: one after the other, or in turns."""
        if not self.turn:
            return [self.run(mode, group) for mode in modes]
        prompts, params = [self.prompts[index] for index in group], [self.params[index] for index in group]
        return take_turns(modes, prompts, params, self.turn)


@dataclass(frozen=True)
class _Timing:
    """One group: prompts decoded together, all of them kept or none."""

    index: int
    """The first prompt of the group."""
    seconds: float
    first_token_seconds: float


@dataclass
class _Results:
    """What one mode has decoded, and how long it took, repeat by repeat and group by group."""

    mode: Mode
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


def measure(
    target: Target, modes: Sequence[Mode], prompts: Sequence[list[int]], config: BenchConfig, progress: bool = True
) -> list[Run]:
    """Time every mode on every prompt, `config.repeats` times, and compare their texts.

    The reference is mlx-lm's greedy text; when sampling or ignoring ends, the plain engine's with the same seeds.
    Prompts on which it loops are decoded once, for the comparison alone. Raises ConfigError where it loops on all of
    them.
    """
    if not prompts or not modes:
        raise ConfigError("there is nothing to measure: no prompts or no modes")
    if config.ignore_eos and any(mode.name in BASELINES for mode in modes):
        raise ConfigError("mlx-lm ends where the model does: leave its modes out, or --ignore-eos")
    work = _Work(prompts, config.params(len(prompts), config.max_tokens), config.params(len(prompts), 1), config.turn)
    results = [_Results(mode) for mode in modes]
    for mode in modes:
        work.run(mode, [0])
    reference = _reference(target, results, work, config, progress)
    indices = range(len(prompts))
    if reference.continuations:
        kept = _kept(reference, indices, config)
        groups = _groups(kept, modes) + _groups([index for index in indices if index not in kept], modes)
        _repeat(results, groups, work, f"repeat 1/{config.repeats}", progress)
    else:
        _repeat(results, _groups(indices, modes), work, f"repeat 1/{config.repeats}", progress)
        kept = _kept(reference, indices, config)
    for repeat in range(1, config.repeats):
        _repeat(results, _groups(kept, modes), work, f"repeat {repeat + 1}/{config.repeats}", progress)
    expected = [one.tokens for one in reference.outputs(indices)]
    return [
        _figures(result, results, _identity(target, result, expected, work, config), kept, config) for result in results
    ]


def _reference(
    target: Target, results: Sequence[_Results], work: _Work, config: BenchConfig, progress: bool
) -> _Results:
    """The result that the others are compared with, filled beforehand unless the first repeat will do that.

    With one prompt at a time the first repeat can decode them all and the loops be set aside after it; in a batch
    the prompts that loop must be known before, so that they do not share rounds with the others.
    """
    name = "plain" if config.temperature or config.ignore_eos else "mlx-lm"
    found = next((result for result in results if result.mode.name == name and result.mode.batch == 1), None)
    if found is not None and all(result.mode.batch == 1 for result in results):
        return found
    result = _Results(EngineMode("plain", target, batch=1) if name == "plain" else MlxLmMode(target))
    for index in progress_bar(range(len(work.prompts)), desc="reference", unit="prompt", disable=not progress):
        result.continuations[index] = work.run(result.mode, [index])[1][0]
    return result


def _kept(reference: _Results, indices: Iterable[int], config: BenchConfig) -> list[int]:
    """The prompts on which the reference does not loop."""
    kept = [i for i in indices if not is_loop(reference.continuations[i].tokens, config.least_distinct)]
    if not kept:
        raise ConfigError(
            f"all {len(reference.continuations)} continuations loop "
            f"(distinct 4-grams under {config.least_distinct:g}), so no figure means anything; "
            "take other prompts or a better target"
        )
    return kept


def _groups(indices: Sequence[int], modes: Sequence[Mode]) -> list[Sequence[int]]:
    """The prompts between two turns: one, or enough to keep the widest batch filled."""
    widest = max(mode.batch for mode in modes)
    size = 1 if widest == 1 else GROUP_PER_ROW * widest
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def _repeat(
    results: Sequence[_Results], groups: Sequence[Sequence[int]], work: _Work, title: str, progress: bool
) -> None:
    """One pass over the groups; within a group the modes take turns, so that all meet the same moments."""
    for result in results:
        result.repeats.append([])
    with progress_bar(total=sum(map(len, groups)), desc=title, unit="prompt", disable=not progress) as bar:
        for number, group in enumerate(groups):
            start = number % len(results)
            ordered = [*results[start:], *results[:start]]
            firsts = [work.run(result.mode, group, first=True)[0] for result in ordered]
            timed = work.run_all([result.mode for result in ordered], group)
            for result, first, (seconds, out) in zip(ordered, firsts, timed, strict=True):
                result.repeats[-1].append(_Timing(group[0], seconds, first))
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
    )


def _ratio(result: _Results, baseline: _Results | None, kept: Sequence[int]) -> float | None:
    """How much faster one is than the other: repeat by repeat, then the median."""
    if baseline is None:
        return None
    return median(mine / its for mine, its in zip(result.rates(kept), baseline.rates(kept), strict=True))


def _identity(
    target: Target, result: _Results, expected: Sequence[Sequence[int]], work: _Work, config: BenchConfig
) -> Identity | None:
    """Over all prompts, those left out included; None for mlx-lm's sampling and batches, and for other rules."""
    name = result.mode.name
    sampled = config.temperature > 0
    if name == "mlx-lm-batch" or (
        sampled and (name in BASELINES or (config.acceptance != "coupled" and name != "plain"))
    ):
        return None
    tokens = [one.tokens for one in result.outputs(range(len(work.prompts)))]
    tolerance = tolerance_for(target) if config.tolerance is None else config.tolerance
    return compare(target, work.prompts, expected, tokens, work.params, tolerance)
