"""What eagle-doctor found: as JSON, as text, and advice in words."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, takewhile
from typing import Any

from eagle_mlx.engine.cost_curve import Curve
from eagle_mlx.machine import Machine
from eagle_mlx.progress import counted, tokens_per_second

from .measure import PlainRounds, PolicyRun, SameBits, Steps

_JUMP = 1.25
"""A verify that costs this many times one of a position less is worth a word."""
_BUSY = 1.3
"""A spread above this means that other programs were at work."""
_LITTLE = 1.1
"""A gain below this is hardly worth a head."""
_LOSS = 0.97
"""The least speed that a useless head may leave."""


@dataclass(frozen=True)
class MeasuredModel:
    """What was measured."""

    name: str
    random_weights: bool
    bits: int | None
    """None if it is not quantized."""
    dtype: str
    weights_gb: float
    cache_mb: float = 0.0
    """Megabytes of the caches of one request of `cache_tokens`."""
    cache_tokens: int = 0

    def __str__(self) -> str:
        weights = f"{'random ' * self.random_weights}weights in {f'{self.bits} bits' if self.bits else self.dtype}"
        caches = f"caches of {self.cache_mb:.1f} MB for a request of {self.cache_tokens} tokens"
        return f"{self.name}, {weights}, {self.weights_gb:.2f} GB, {caches}"


@dataclass(frozen=True)
class Findings:
    machine: Machine
    free_gb: float
    """Memory that is left with the model loaded; on a GPU, of what the device recommends to use."""
    wired_limit_mb: int | None
    """macOS's limit for wired memory: 0 is the system's own; None elsewhere."""
    model: MeasuredModel
    steps: Steps
    prefill: float
    """Tokens per second."""
    curve_at_load: Curve
    """Tokens and seconds of a forward, as commands measure them when they load a model."""
    same_bits: Sequence[SameBits]
    plain_rounds: PlainRounds
    policy: Sequence[PolicyRun]
    draft_model: MeasuredModel | None = None


def as_json(found: Findings) -> dict[str, Any]:
    return {**asdict(found), "advice": list(advice(found))}


def as_text(found: Findings) -> str:
    model, steps, plain = found.model, found.steps, found.plain_rounds
    one = steps.verify_ms[1]
    limits = f"{found.machine.memory_gb:.1f} GB, {found.free_gb:.1f} GB free after loading"
    if found.wired_limit_mb is not None:
        limits += f", wired limit {found.wired_limit_mb or 'not changed'}"
    lines = [f"machine: {found.machine}", f"memory: {limits}"]
    lines += [f"model: {model}", *([f"draft model: {found.draft_model}"] if found.draft_model else []), ""]
    lines += ["| positions | ms of a verify | of one position |", "|---|---|---|"]
    lines += [f"| {count} | {ms:.2f} | {ms / one:.2f} |" for count, ms in steps.verify_ms.items()]
    lines += ["", f"draft token: {steps.draft_ms:.2f} ms, {steps.draft_ms / one:.2f} of a verify of one position"]
    lines += [f"prompt: {tokens_per_second(found.prefill)}"]
    lines += [
        f"verify of {each.positions}: of {each.compared} positions, {each.equal} have the bits of a verify of 1, "
        f"{each.as_two} those of a verify of 2, and {each.other_argmax} another most likely token"
        for each in found.same_bits
    ]
    lines.append(
        f"plain round: {plain.ms:.2f} ms, {plain.alone_ms:.2f} without running ahead; memory beyond the weights "
        f"{plain.gb:.3f} GB, {plain.alone_gb:.3f} without, after {plain.context} tokens"
    )
    lines += [_policy_line(run) for run in found.policy]
    return "\n".join([*lines, "", *(f"- {text}" for text in advice(found))])


def _policy_line(run: PolicyRun) -> str:
    best = f"best with {counted(run.best_depth, 'draft token')}, {run.best_speed:.2f} times plain"
    until = "not found" if run.rounds is None else f"found after {counted(run.rounds, 'round')}, {run.seconds:.2f} s"
    return f"{run.acceptance:.0%} accepted: {best}, {until}; first 200 rounds {run.first_rounds:.2f} (simulated)"


def advice(found: Findings) -> Iterator[str]:
    """Yield sentences that say what the figures mean."""
    verify, (useless, usual, good) = found.steps.verify_ms, found.policy
    if found.steps.spread > _BUSY:
        yield f"Times vary by {found.steps.spread:.1f}: close other programs and repeat this."
    if sys.platform == "linux" and found.machine.blas == "reference":
        yield "MLX's own BLAS is slow: sudo apt-get install libopenblas0-pthread."
    if found.machine.device == "cpu" and found.model.bits:
        yield "A CPU reads quantized weights again for each position, so drafts cost much: try a model in float32."
    if good.best_speed < _LITTLE:
        yield "Even a good head gains little here: decode plainly, or with --spec-decode ngram for texts that repeat."
    else:
        yield (
            f"Drafting pays: with {good.acceptance:.0%} of draft tokens accepted, {good.best_depth} per round give "
            f"{good.best_speed:.2f} times the speed of plain decoding; with {usual.acceptance:.0%}, "
            f"{usual.best_depth} give {usual.best_speed:.2f} times."
        )
    for (fewer, ms), (count, more) in pairwise(verify.items()):
        if 1 < fewer and count <= 16 and count - fewer == 1 and more > _JUMP * ms:
            yield (
                f"A verify of {count} positions costs {more / ms:.2f} times one of {fewer}: with --spec-policy fixed, "
                f"try --num-speculative-tokens {fewer - 1}."
            )
    if useless.first_rounds < _LOSS:
        yield (
            f"A useless head would slow the first 200 rounds to {useless.first_rounds:.2f} of plain decoding; for "
            "single short answers, decode plainly."
        )
    yield from _about_bits(found.same_bits, verify, found.model.random_weights)


def _about_bits(same: Sequence[SameBits], verify: Mapping[int, float], random_weights: bool) -> Iterator[str]:
    if all(each.equal == each.compared for each in same):
        yield "Verifies and plain rounds give the same bits: texts are equal token for token without --exact."
        return
    other, compared = sum(each.other_argmax for each in same), sum(each.compared for each in same)
    more = " (trained weights have fewer near-ties)" if random_weights else ""
    yield (
        "Verifies and plain rounds round differently, so near-ties may give another text: the most likely token "
        f"differs at {other} of {compared} positions{more}."
    )
    widest = max((each.positions for each in takewhile(lambda each: each.as_two == each.compared, same)), default=0)
    if widest <= 2:
        yield "--exact does not help: verifies of 2 and 4 positions round differently, too."
        return
    yield (
        f"With --exact, texts are equal while rounds read up to {widest} positions (for one request: "
        f"--num-speculative-tokens {widest - 1}); plain rounds then take {verify[2] / verify[1]:.2f} times as long."
    )
