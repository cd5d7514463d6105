"""Measure a model, and show the findings: as JSON, as text, and as advice in words."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, takewhile
from pathlib import Path

import mlx.core as mx

from eagle_mlx import __version__
from eagle_mlx.catalog.models import described_target, published_model
from eagle_mlx.cpu import compute_dtype
from eagle_mlx.engine.cost_curve import Curve, curve_of, measured_times
from eagle_mlx.engine.groups import size_of
from eagle_mlx.errors import ConfigError
from eagle_mlx.files import check_file, write_output
from eagle_mlx.heads.eagle3 import random_head
from eagle_mlx.heads.precision import quantize_for
from eagle_mlx.machine import Machine, describe, wired_limit_mb
from eagle_mlx.memory import free_memory, gb, limit_mlx
from eagle_mlx.progress import counted, progress_bar, tokens_per_second
from eagle_mlx.target import Target, nbytes_of

from . import measure
from .measure import BestChain, SameBits, Steps
from .options import PRINT, USUAL, DoctorOptions

_SHARE = 0.5  # the share of the free memory for the weights
_DRAFTED = 32_000  # the draft vocabulary of published EAGLE-3 heads
_CACHED = 4096  # tokens of the request whose caches are shown; fewer if the model reads fewer
_JUMP = 1.25  # a verify that costs this many times one of a position less is worth a word
_BUSY = 1.3  # a spread above this means that other programs were at work
_LITTLE = 1.1  # a gain below this is hardly worth a head


@dataclass(frozen=True)
class MeasuredModel:
    name: str
    random_weights: bool
    bits: int | None  # None if it is not quantized
    dtype: str
    weights_gb: float
    cache_mb: float = 0.0  # megabytes of the caches of one request of `cache_tokens`
    cache_tokens: int = 0

    def __str__(self) -> str:
        weights = f"{'random ' * self.random_weights}weights in {f'{self.bits} bits' if self.bits else self.dtype}"
        caches = f"caches of {self.cache_mb:.1f} MB for a request of {self.cache_tokens} tokens"
        return f"{self.name}, {weights}, {self.weights_gb:.2f} GB, {caches}"


@dataclass(frozen=True)
class Findings:
    machine: Machine
    free_gb: float  # memory that is left with the model loaded; on a GPU, of what the device recommends to use
    wired_limit_mb: int | None  # macOS's limit for wired memory: 0 is the system's own; None elsewhere
    model: MeasuredModel
    steps: Steps
    prefill: float  # tokens per second
    curve_at_load: Curve  # tokens and seconds of a forward, as commands measure them when they load a model
    same_bits: Sequence[SameBits]
    chains: Sequence[BestChain]


def doctor(options: DoctorOptions, command: str) -> None:
    file = None if options.json in (None, PRINT) else Path(options.json)
    if file is not None:
        check_file(file)
    mx.random.seed(0)
    findings = _measured(options)
    figures = {"eagle_mlx": __version__, "command": command, **asdict(findings), "advice": list(advice(findings))}
    text = json.dumps(figures, indent=1)
    if file is not None:
        write_output(file, text + "\n")
    print(text if options.json == PRINT else as_text(findings))


def _measured(options: DoctorOptions) -> Findings:
    seconds = options.seconds
    target = _random_target(options) if options.target is None else options.loading.load(options.target)
    head = random_head(target, draft_vocab=min(_DRAFTED, target.vocab_size // 2))
    quantize_for(head, target)
    options.loading.wire_active()
    free = free_memory() / 1e9
    steps = measure.time_steps(target, head, seconds)
    prefill, curve = measure.prefill_rate(target, seconds), curve_of(measured_times(target))
    compared = 16 * max(1, min(4, int(seconds / (48e-3 * steps.verify_ms[1]))))  # fewer on a slow machine
    return Findings(
        machine=describe(),
        free_gb=free,
        wired_limit_mb=wired_limit_mb(),
        model=_sizes(target, options.target is None),
        steps=steps,
        prefill=prefill,
        curve_at_load=curve,
        same_bits=measure.compare_bits(target, compared),
        chains=[measure.best_chain(steps, chance) for chance in measure.CHANCES],
    )


def _sizes(target: Target, random_weights: bool = False) -> MeasuredModel:
    dtype, tokens = str(target.dtype).rpartition(".")[2], min(_CACHED, target.context_length)
    caches = size_of(target, None, None).nbytes(1, tokens) / 1e6
    return MeasuredModel(target.name, random_weights, target.bits, dtype, nbytes_of(target.model) / 1e9, caches, tokens)


def _random_target(options: DoctorOptions) -> Target:
    """Return a target with random weights, quantized as published or, for a BLAS, not at all."""
    on_cpu, room = mx.default_device() == mx.Device(mx.cpu), _SHARE * free_memory()
    names = [options.shape] if options.shape is not None else USUAL[-1:] if on_cpu else USUAL
    dtype = compute_dtype()
    bits = options.bits or (None if dtype is None else 16)
    for name in names:
        model = dict(published_model(name))
        if bits is not None:
            model["quantization"] = {} if bits == 16 else {"group_size": 64, "bits": bits}
        target = described_target(name, model, dtype or mx.bfloat16)  # nothing is computed yet
        if nbytes_of(target.model) <= room:
            break
    else:
        raise ConfigError(f"{name} does not fit {gb(room)}, half of the free memory; choose a smaller --shape")
    for part in progress_bar([*target.layers, target.model], desc=f"build {name}", unit="layer"):
        mx.eval(part.parameters())
    limit_mlx()
    return target


def as_text(findings: Findings) -> str:
    model, steps = findings.model, findings.steps
    single = steps.verify_ms[1]
    limits = f"{findings.machine.memory_gb:.1f} GB, {findings.free_gb:.1f} GB free after loading"
    if findings.wired_limit_mb is not None:
        limits += f", wired limit {findings.wired_limit_mb or 'not changed'}"
    lines = [f"machine: {findings.machine}", f"memory: {limits}", f"model: {model}"]
    lines += ["", "| positions | ms of a verify | of one position |", "|---|---|---|"]
    lines += [f"| {count} | {ms:.2f} | {ms / single:.2f} |" for count, ms in steps.verify_ms.items()]
    lines += ["", f"draft token: {steps.draft_ms:.2f} ms, {steps.draft_ms / single:.2f} of a verify of one position"]
    lines += [f"prompt: {tokens_per_second(findings.prefill)}"]
    lines += [
        f"verify of {same.positions}: of {same.compared} positions, {same.equal} have the bits of a verify of 1, "
        f"{same.as_two} those of a verify of 2, and {same.other_argmax} another most likely token"
        for same in findings.same_bits
    ]
    lines += [
        f"{chain.acceptance:.0%} accepted: best with {counted(chain.depth, 'token')}, {chain.speed:.2f} times plain"
        for chain in findings.chains
    ]
    return "\n".join([*lines, "", *(f"- {text}" for text in advice(findings))])


def advice(findings: Findings) -> Iterator[str]:
    """Yield sentences that say what the figures mean."""
    verify, (usual, good) = findings.steps.verify_ms, findings.chains
    if findings.steps.spread > _BUSY:
        yield f"Times vary by {findings.steps.spread:.1f}: close other programs and repeat this."
    if sys.platform == "linux" and findings.machine.blas == "reference":
        yield "MLX's own BLAS is slow: sudo apt-get install libopenblas0-pthread."
    if findings.machine.device == "cpu" and findings.model.bits:
        yield "A CPU reads quantized weights again for each position, so drafts cost much: try a model in float32."
    if good.speed < _LITTLE:
        yield "Even a good head gains little here: decode plainly, or with --spec-decode ngram for texts that repeat."
    else:
        yield (
            f"Drafting pays: with {good.acceptance:.0%} of draft tokens accepted, {good.depth} per round give "
            f"{good.speed:.2f} times the speed of plain decoding; with {usual.acceptance:.0%}, "
            f"{usual.depth} give {usual.speed:.2f} times."
        )
        for (fewer, ms), (count, more) in pairwise(verify.items()):
            if fewer - 1 in {usual.depth, good.depth} - {0} and count - fewer == 1 and more > _JUMP * ms:
                yield (
                    f"A verify of {count} positions costs {more / ms:.2f} times one of {fewer}: with --spec-policy "
                    f"fixed, try --num-speculative-tokens {fewer - 1}."
                )
    yield from _about_bits(findings.same_bits, verify, findings.model.random_weights)


def _about_bits(same_bits: Sequence[SameBits], verify: Mapping[int, float], random_weights: bool) -> Iterator[str]:
    if all(same.equal == same.compared for same in same_bits):
        yield "Verifies and plain rounds give the same bits: texts are equal token for token without --exact."
        return
    other, compared = sum(same.other_argmax for same in same_bits), sum(same.compared for same in same_bits)
    more = " (trained weights have fewer near-ties)" if random_weights else ""
    yield (
        "Verifies and plain rounds round differently, so near-ties may give another text: the most likely token "
        f"differs at {other} of {compared} positions{more}."
    )
    alike = takewhile(lambda same: same.as_two == same.compared, same_bits)
    widest = max((same.positions for same in alike), default=0)
    if widest <= 2:
        yield "--exact does not help: verifies of 2 and 4 positions round differently, too."
        return
    yield (
        f"With --exact, texts are equal while rounds read up to {widest} positions (for one request: "
        f"--num-speculative-tokens {widest - 1}); plain rounds then take {verify[2] / verify[1]:.2f} times as long."
    )
