"""eagle-doctor: measure this machine without a download, and say what that means for speculative decoding."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import mlx.core as mx

from eagle_mlx.catalog.models import described_target, published_model
from eagle_mlx.command import arguments, exit_code, read
from eagle_mlx.engine.cost_curve import curve_of, measured_times
from eagle_mlx.engine.groups import size_of
from eagle_mlx.errors import ConfigError
from eagle_mlx.files import check_file, write_output
from eagle_mlx.heads.eagle3 import random_head
from eagle_mlx.heads.precision import quantize_for
from eagle_mlx.machine import describe, wired_limit_mb
from eagle_mlx.memory import free_memory, gb, limit_mlx
from eagle_mlx.progress import progress_bar
from eagle_mlx.proposers.draft_model import check_same_tokenizer
from eagle_mlx.setting import ABOVE_0, Group, setting
from eagle_mlx.target import Target, compute_dtype, load_target, nbytes_of
from eagle_mlx.target_options import TargetOptions

from . import measure
from .report import Findings, MeasuredModel, as_json, as_text

_USUAL = ("qwen3-8b", "qwen3-4b", "qwen3-1.7b", "qwen3-0.6b", "smollm2-135m")
"""The shapes of which the first that fits is the default on a GPU; on a CPU it is the last."""
_SHARE = 0.5
"""The share of the free memory for the weights."""
_DRAFTED = 32_000
"""The draft vocabulary of published EAGLE-3 heads."""
_CACHED = 4096
"""Tokens of the request whose caches are shown; fewer if the model reads fewer."""
_PRINT = "-"
EPILOG = """\
examples:
  eagle-doctor                              the sizes of a model that fits, with random weights; some two minutes
  eagle-doctor --shape qwen3-30b-a3b        other sizes
  eagle-doctor --target Qwen3-4B-4bit       a real model
  eagle-doctor --json                       print JSON to paste into an issue

Random weights cost as much time and memory as trained ones. Near-ties of two tokens are more frequent with them."""


@dataclass(frozen=True)
class DoctorOptions(Group):
    """What to measure."""

    shape: str | None = setting(
        None,
        f"build a model of these sizes with random weights; an unknown name lists all (default: the first of "
        f"{', '.join(_USUAL[:-1])} that fits; on a CPU {_USUAL[-1]})",
        metavar="NAME",
    )
    target: str | None = setting(None, "measure this model, a folder or hub id", metavar="MODEL")
    draft_model: str | None = setting(
        None, "show weights and caches of this model, which drafts for --target", metavar="MODEL"
    )
    bits: Literal[4, 8, 16] | None = setting(
        None, "bits of random weights; 16 is not quantized (default: 4; on a CPU under Linux 16)"
    )
    seconds: float = setting(20.0, "limit of each part; slow machines measure fewer sizes", ABOVE_0, metavar="S")
    json: str | None = setting(
        None, "write the figures as JSON; without a file, print them", metavar="FILE", bare=_PRINT
    )
    loading: TargetOptions = field(default_factory=TargetOptions)

    def _check(self) -> None:
        if self.target is not None and (self.shape is not None or self.bits is not None):
            raise ConfigError("--target is measured as it is; leave out --shape and --bits")
        if self.target is None and self.draft_model is not None:
            raise ConfigError("--draft-model drafts for a real model; give --target")
        if self.target is None and self.loading.shard != "none":
            raise ConfigError("--shard divides a real model; give --target")


def main(argv: Sequence[str] | None = None) -> int:
    """Run eagle-doctor. Return the exit status: 0, 2 for an error, 130 if interrupted."""
    about = "Measure what a model of common sizes costs on this machine, without a download, and give advice."
    given = arguments(argv)
    command = shlex.join(["eagle-doctor", *given])
    return exit_code(lambda: _doctor(read(DoctorOptions, given, "eagle-doctor", about, EPILOG), command))


def _doctor(options: DoctorOptions, command: str) -> None:
    file = None if options.json in (None, _PRINT) else Path(options.json)
    if file is not None:
        check_file(file)
    mx.random.seed(0)
    found = _measured(options)
    text = json.dumps({"eagle_mlx": version("eagle-mlx"), "command": command, **as_json(found)}, indent=1)
    if file is not None:
        write_output(file, text + "\n")
    print(text if options.json == _PRINT else as_text(found))


def _measured(options: DoctorOptions) -> Findings:
    seconds = options.seconds
    target = _random_target(options) if options.target is None else options.loading.load(options.target)
    draft = None if options.draft_model is None else load_target(options.draft_model)
    if draft is not None:
        check_same_tokenizer(draft, target)
    head = random_head(target, draft_vocab=min(_DRAFTED, target.vocab_size // 2))
    quantize_for(head, target)
    options.loading.wire_active()
    free = free_memory() / 1e9
    steps = measure.time_steps(target, head, seconds)
    prefill, curve = measure.prefill_rate(target, seconds), curve_of(measured_times(target))
    # Both are shorter on a slow machine.
    compared = 16 * max(1, min(4, int(seconds / (48e-3 * steps.verify_ms[1]))))
    context = max(16, min(measure.LONG, target.context_length // 2, int(prefill * seconds / 4)))
    return Findings(
        machine=describe(),
        free_gb=free,
        wired_limit_mb=wired_limit_mb(),
        model=_sizes(target, options.target is None),
        steps=steps,
        prefill=prefill,
        curve_at_load=curve,
        same_bits=measure.compare_bits(target, compared),
        plain_rounds=measure.plain_rounds(target, context, seconds),
        policy=[measure.simulate_policy(steps, curve, chance) for chance in measure.CHANCES],
        draft_model=None if draft is None else _sizes(draft),
    )


def _sizes(target: Target, random_weights: bool = False) -> MeasuredModel:
    dtype, tokens = str(target.dtype).rpartition(".")[2], min(_CACHED, target.context_length)
    caches = size_of(target, None, None).nbytes(1, tokens) / 1e6
    return MeasuredModel(target.name, random_weights, target.bits, dtype, nbytes_of(target.model) / 1e9, caches, tokens)


def _random_target(options: DoctorOptions) -> Target:
    """Return a target with random weights, quantized as published or, for a BLAS, not at all."""
    on_cpu, room = mx.default_device() == mx.Device(mx.cpu), _SHARE * free_memory()
    names = [options.shape] if options.shape is not None else _USUAL[-1:] if on_cpu else _USUAL
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


if __name__ == "__main__":
    sys.exit(main())
