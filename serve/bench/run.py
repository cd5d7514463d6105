"""Load the models, measure every mode, and report."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import get_args

from eagle_mlx import Target, __version__, blas, hub, load_target
from eagle_mlx.catalog import embedded
from eagle_mlx.errors import ConfigError
from eagle_mlx.extras import require
from eagle_mlx.files import check_file
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.eagle3 import random_head
from eagle_mlx.heads.precision import described, in_dtype, quantization_of, quantize_for
from eagle_mlx.machine import describe

from ..head_choice import load_head, usable_heads
from ..prompts import read_questions, with_filler
from ..speculation import AUTO, NO_HEAD
from . import report
from .measure import measure, tolerance_for
from .modes import BenchModels, build_modes, missing
from .options import BASELINES, NEEDS, RANDOM, USE_HEAD, BenchOptions, ModeName
from .report import BenchRun


def bench(options: BenchOptions, command: str) -> int:
    """Run eagle-bench. Return the exit status: 0, or 1 if a text differs."""
    if options.plot is not None:
        require("eagle-bench --plot", "plots")
    loading, name = options.loading, options.target or embedded("target")
    loading.follow(name)
    for path in filter(None, (options.json, options.plot)):
        check_file(path)
    questions = read_questions(options.prompts or embedded("prompts.jsonl"), options.limit)
    print(f"blas: {blas.activate()}")
    modes, head_name = _modes(options)
    say = partial(print, file=sys.stderr) if not options.quiet else lambda text: None
    say(f"loading {' and '.join(str(model) for model in (name, head_name, options.draft_model) if model)}")
    target = loading.load(name)
    head = _head(head_name, target, options.head_bits)
    draft = load_target(options.draft_model) if options.draft_model is not None else None
    loading.wire_active()
    if options.filler is not None:
        questions = with_filler(questions, target, options.filler)
    machine, dtype = describe(), str(target.dtype).rpartition(".")[2]
    which = "none" if head is None else f"{head_name}, {described(head)}"
    print(f"machine: {machine}\ntarget: {target.name} in {dtype}\nhead: {which}")
    if draft is not None:
        print(f"draft model: {draft.name}")
    window = options.draft_window, options.draft_sink
    models = BenchModels(target, head, draft, options.memory, options.prior, window)
    runs = list[BenchRun]()
    for temperature in options.temperature:
        say("preparing the modes")
        built = build_modes(models, modes, options.batch, options.depths, options.policy, options.nodes)
        config = replace(options.measuring, temperature=temperature)
        runs += measure(target, built, questions, config, progress=not options.quiet)
    tolerance = tolerance_for(target)
    footnote = report.footnote(runs, options.measuring.max_tokens, tolerance)
    print(f"\n{report.table(runs)}\n\n{report.by_category(runs)}{footnote}")
    if options.json is not None:
        figures = {
            "target": target.name,
            "dtype": dtype,
            "head": None if head_name is None else str(head_name),
            "machine": asdict(machine),
            "command": command,
            "eagle_mlx": __version__,
            "prompts": str(options.prompts or embedded("prompts.jsonl")),
            "head_sha256": None if head_name in (None, RANDOM) else hub.weights_digest(hub.head_folder(head_name)),
            "head_quantization": quantization_of(head) if head is not None else None,
            "filler": options.filler or 0,
            "draft_window": options.draft_window,
            "draft_sink": options.draft_sink,
            **options.measuring.flat(),
            "tolerance": tolerance,
            "runs": list(map(asdict, runs)),
        }
        report.write_json(figures, options.json)
    if options.plot is not None:
        report.plot(runs, target.name, options.plot)
    return 1 if any(run.identical is False for run in runs) else 0


def _head(name: str | Path | None, target: Target, bits: int | None) -> DraftHead | None:
    if name is None:
        if bits is not None:
            raise ConfigError("--head-bits needs a --head and a mode that uses it, such as eagle")
        return None
    if name == RANDOM:
        head: DraftHead = random_head(target)
        quantize_for(head, target, bits)
        return head
    return in_dtype(load_head(name, target, bits), target.dtype)


def _modes(options: BenchOptions) -> tuple[list[ModeName], str | Path | None]:
    """Return the modes to run, and the head that they need or None."""
    head = _head_name(options)
    modes = list(options.modes or get_args(ModeName))
    by_mlx_lm = [name for name in modes if name in BASELINES]
    given = {"--head": head, "--draft-model": options.draft_model}
    lacking = [name for name in modes if name in NEEDS and not any(given[flag] for flag in NEEDS[name])]
    is_sharded = options.loading.shard != "none"
    if options.modes is None:
        if head is None:
            print("no head for this target: leaving out mode eagle")
        left_out = [*lacking, *(by_mlx_lm if is_sharded else ())]
        modes = [name for name in modes if name not in left_out]
    elif lacking:
        raise missing(lacking[0])
    elif is_sharded and by_mlx_lm:
        raise ConfigError(f"mode {by_mlx_lm[0]} does not work with --shard: mlx-lm would run one part of the target")
    return modes, head if not set(modes).isdisjoint(USE_HEAD) else None


def _head_name(options: BenchOptions) -> str | Path | None:
    """Return the named head, the embedded one, or the first one found; None if no mode needs one."""
    if options.head not in (None, AUTO):
        return None if options.head == NO_HEAD else options.head
    if set(options.modes or USE_HEAD).isdisjoint(USE_HEAD):
        return None
    if options.target is None:
        return embedded("head")
    match = next(usable_heads(options.target, print), None)
    if match is not None:
        print(f"head: {match.about}")
    return match.head if match is not None else None
