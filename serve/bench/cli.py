"""eagle-bench: measure how much faster the same text is generated."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Literal, get_args

from eagle_mlx import hub
from eagle_mlx.catalog import embedded
from eagle_mlx.command import arguments, exit_code, read
from eagle_mlx.cpu import blas
from eagle_mlx.errors import ConfigError
from eagle_mlx.extras import require
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.eagle3 import random_head
from eagle_mlx.heads.precision import described, in_dtype, quantization_of, quantize_for
from eagle_mlx.machine import describe
from eagle_mlx.setting import AT_LEAST_0, AT_LEAST_1, SHARE, Group, setting
from eagle_mlx.target import Target, load_target
from eagle_mlx.target_options import TargetOptions

from ..options import MemoryOptions
from ..prompts import behind_filler, read_questions
from ..speculation import (
    AUTO,
    DEFAULT_TOKENS,
    HEAD_BITS,
    NO_HEAD,
    TARGET_HELP,
    HeadBits,
    PolicyName,
    load_quantized,
    usable_heads,
    warn_of_head,
)
from . import report
from .decoding import ModeName, tolerance_for
from .measure import BenchConfig, measure, type_name
from .modes import (
    DEFAULT_MODES,
    MLX_LM,
    NEEDS,
    STOCK,
    USE_HEAD,
    Models,
    StockModel,
    build_modes,
    missing,
)
from .report import Run

EPILOG = """\
examples:
  eagle-bench                                   the embedded target and head on the embedded prompts
  eagle-bench --depth 1 2 4 6 --modes mlx-lm eagle
  eagle-bench --target mlx-community/Qwen3-4B-4bit --head out/head --prompts mine.jsonl --json figures.json
  eagle-bench --batch 1 4 8 --temperature 0 0.7
  eagle-bench --target Qwen3-4B-4bit --prompts spec_bench.jsonl --limit 80      τ and tokens/s by category
  eagle-bench --head random --modes plain eagle --policy throughput     what a useless head costs

All modes decode the same prompts in one process, in turns; figures are medians over the repeats. mlx-lm and
mlx-lm-draft decode one prompt at a time whatever --batch says; mlx-lm-batch stands beside every batch above 1. Text is
compared with mlx-lm's greedy text; above temperature 0 with that of the plain engine under the same seeds.

All modes but mlx-lm-stock decode one model object, as EAGLE-MLX loads it: on a CPU under Linux in float32.
mlx-lm-stock decodes a second copy as mlx_lm.load loads the folder, in its own type. In another type two tokens that
tie may come in another order, so its text may differ; that does not change the exit status. mlx-lm takes the largest
log probability, EAGLE-MLX the largest logit: if a 16-bit model is unsure, rounding the former can make a tie."""


@dataclass(frozen=True)
class BenchOptions(Group):
    """What to measure, and on what."""

    target: str | None = setting(None, TARGET_HELP, metavar="MODEL")
    head: str | None = setting(
        None, "folder or hub id of its head; auto, the default, as in eagle-serve; none; random: the worst there is"
    )
    head_bits: HeadBits | None = setting(None, HEAD_BITS)
    draft_model: str | None = setting(None, "folder or hub id of a small model of the same tokenizer", metavar="MODEL")
    modes: tuple[ModeName, ...] | None = setting(None, f"default: all for which there are models, but {STOCK}")
    batch: tuple[int, ...] = setting((1,), "rows at once", AT_LEAST_1)
    depth: tuple[int, ...] | None = setting(
        None,
        "draft tokens a round, the most where the policy adapts (default: 4, with --policy throughput alone 8)",
        AT_LEAST_1,
        metavar="K",
    )
    nodes: tuple[int, ...] = setting(
        (0,), "tokens of a draft tree that is at most K deep; 0 for chains; --nodes 0 16 compares both"
    )
    policy: tuple[PolicyName, ...] = setting(("fixed",), "what decides how many of K are drafted; fixed: all")
    temperature: tuple[float, ...] = setting((BenchConfig.temperature,), "0 is greedy", metavar="T")
    acceptance: Literal["coupled", "rejection"] = setting(BenchConfig.acceptance, "of sampled drafts")
    prompts: Path | None = setting(None, "jsonl of `messages`, `prompt` or `turns` rows (default: held-out functions)")
    limit: int = setting(100, "prompts to take, evenly of all categories", AT_LEAST_1)
    filler: int | None = setting(
        None,
        "put N tokens of text before each prompt, another text each: what a long context does to drafting",
        AT_LEAST_1,
    )
    max_tokens: int = setting(BenchConfig.max_tokens, "new tokens each", AT_LEAST_1)
    ignore_eos: bool = setting(False, "let every continuation be --max-tokens long")
    repeats: int = setting(BenchConfig.repeats, "times that each is measured", AT_LEAST_1)
    turn: int = setting(
        BenchConfig.turn,
        "let the modes change over after every N tokens a row rather than after whole prompts, where a machine's speed "
        "varies; mlx-lm-batch has one long turn",
        AT_LEAST_0,
        shown="",
    )
    seed: int = setting(BenchConfig.seed, "of the first prompt when sampling")
    least_distinct: float = setting(
        BenchConfig.least_distinct,
        "leave out continuations with a smaller share of distinct 4-grams",
        SHARE,
        metavar="R",
    )
    tolerance: float | None = setting(
        None, "excuse a first difference where the two best logits are closer than this (default: by the model's type)"
    )
    prior: bool = setting(
        False,
        "with --policy throughput: begin with the target's cost curve, which is measured once and kept",
    )
    json: Path | None = setting(None, "write the figures")
    plot: Path | None = setting(None, "draw them; trees of several sizes as curves", metavar="FILE.png")
    quiet: bool = setting(False, "no progress bars")
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    loading: TargetOptions = field(default_factory=TargetOptions)

    def configs(self) -> list[BenchConfig]:
        """Return a configuration for each temperature."""
        same = {each.name: getattr(self, each.name) for each in fields(BenchConfig) if each.name != "temperature"}
        return [BenchConfig(temperature=temperature, **same) for temperature in self.temperature]


def main(argv: Sequence[str] | None = None) -> int:
    """Run eagle-bench. Return the exit status: 0, 1 if a text differs, 2 for an error, 130 if interrupted."""
    given = arguments(argv)
    about = "Measure tokens/s, acceptance and identity of speculative decoding against plain decoding."
    command = shlex.join(["eagle-bench", *given])
    return exit_code(lambda: _bench(read(BenchOptions, given, "eagle-bench", about, EPILOG), command))


def _bench(options: BenchOptions, command: str) -> int:
    if options.plot is not None:
        require("eagle-bench --plot", "train", "matplotlib")
    loading, name = options.loading, options.target or embedded("target")
    loading.follow(name)
    print(f"blas: {blas.activate()}")
    for path in (options.json, options.plot):
        if path is not None:
            report.check_writable(path)
    modes, head_name = _modes(options)
    target = loading.load(name)
    head = _head(head_name, target, options.head_bits)
    draft = load_target(options.draft_model) if options.draft_model is not None else None
    loading.wire_active()
    questions = read_questions(options.prompts or embedded("prompts.jsonl"), options.limit)
    if options.filler is not None:
        questions = behind_filler(questions, target, options.filler)
    machine = describe()
    which = "none" if head is None else f"{head_name}, {described(head)}"
    print(f"machine: {machine}\ntarget: {target.name}\nhead: {which}")
    if draft is not None:
        print(f"draft model: {draft.name}")
    depth = options.depth or (min(DEFAULT_TOKENS[policy] for policy in options.policy),)
    runs: list[Run] = []
    stock = StockModel.load(name, loading.adapter_path or None, loading.trust_remote_code) if STOCK in modes else None
    models = Models(target, head, draft, options.memory.kv_bytes, options.memory.prefill_chunk, options.prior, stock)
    for config in options.configs():
        built = build_modes(models, modes, options.batch, depth, options.policy, options.nodes)
        runs += measure(target, built, questions, config, progress=not options.quiet)
    tolerance = tolerance_for(target) if options.tolerance is None else options.tolerance
    print(f"\n{report.table(runs)}\n\n{report.by_category(runs)}{report.footnote(runs, options.max_tokens, tolerance)}")
    extra: dict[str, object] = {
        "command": command,
        "eagle_mlx": version("eagle-mlx"),
        "prompts": str(options.prompts or embedded("prompts.jsonl")),
        "head_sha256": _digest(head_name),
        "head_quantization": quantization_of(head) if head is not None else None,
        "filler": options.filler or 0,
        "max_tokens": options.max_tokens,
        "acceptance": options.acceptance,
        "repeats": options.repeats,
        "turn": options.turn,
        "tolerance": tolerance,
    }
    if options.json is not None:
        head_text = str(head_name) if head_name is not None else None
        report.write_json(report.document(target.name, head_text, machine, runs, **extra), options.json)
    if options.plot is not None:
        report.plot(runs, options.plot)
    own = type_name(target.dtype)
    return 1 if any(run.identical is False and run.dtype == own for run in runs) else 0


def _head(name: str | Path | None, target: Target, bits: int | None) -> DraftHead | None:
    """Load the head in the target's type, or return None without a name."""
    if name is None:
        if bits is not None:
            raise ConfigError("--head-bits needs a --head, and mode eagle")
        return None
    if name == "random":
        head: DraftHead = random_head(target)
        quantize_for(head, target, bits)
        return head
    head = in_dtype(load_quantized(name, target, bits), target.dtype)
    warn_of_head(head, target)
    return head


def _digest(name: str | Path | None) -> str | None:
    """Return a hash of the head's weights, which identifies the head in reports."""
    return None if name is None or name == "random" else hub.weights_digest(hub.resolve(name))


def _modes(options: BenchOptions) -> tuple[list[ModeName], str | Path | None]:
    """Return the modes to run, and the head that they need or None."""
    head = _head_name(options)
    given = {"--head": head is not None, "--draft-model": options.draft_model is not None}
    given["--head or --draft-model"] = any(given.values())
    if options.modes is None:
        if head is None:
            print("no head for this target: leaving out mode eagle")
        modes = [name for name in DEFAULT_MODES if name not in NEEDS or given[NEEDS[name]]]
        modes = [name for name in modes if options.loading.shard == "none" or not name.startswith(MLX_LM)]
    else:
        modes = list(options.modes)
    for name in modes:
        if name in NEEDS and not given[NEEDS[name]]:
            raise missing(name)
        if options.loading.shard != "none" and name.startswith(MLX_LM):
            raise ConfigError(f"mode {name} does not go with --shard: mlx-lm would run a part of the target alone")
    return modes, head if not set(modes).isdisjoint(USE_HEAD) else None


def _head_name(options: BenchOptions) -> str | Path | None:
    """Return the named head, the embedded one, or the first one found; None if no mode needs one."""
    if options.head not in (None, AUTO) or set(options.modes or get_args(ModeName)).isdisjoint(USE_HEAD):
        return None if options.head in (AUTO, NO_HEAD) else options.head
    if options.target is None:
        return embedded("head")
    found = next(usable_heads(options.target, print), None)
    if found is not None:
        print(f"head: {found.reason}")
    return found.head if found is not None else None


if __name__ == "__main__":
    sys.exit(main())
