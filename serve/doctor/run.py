"""Measure a model, and show the findings."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx

from eagle_mlx import __version__
from eagle_mlx.catalog.models import described_target, published_model
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
from eagle_mlx.target import Target, compute_dtype, load_target, nbytes_of

from . import measure
from .options import PRINT, USUAL, DoctorOptions
from .report import Findings, MeasuredModel, as_json, as_text

_SHARE = 0.5
"""The share of the free memory for the weights."""
_DRAFTED = 32_000
"""The draft vocabulary of published EAGLE-3 heads."""
_CACHED = 4096
"""Tokens of the request whose caches are shown; fewer if the model reads fewer."""


def doctor(options: DoctorOptions, command: str) -> None:
    """Run eagle-doctor with these options. command: the line that the user typed."""
    file = None if options.json in (None, PRINT) else Path(options.json)
    if file is not None:
        check_file(file)
    mx.random.seed(0)
    found = _measured(options)
    text = json.dumps({"eagle_mlx": __version__, "command": command, **as_json(found)}, indent=1)
    if file is not None:
        write_output(file, text + "\n")
    print(text if options.json == PRINT else as_text(found))


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
