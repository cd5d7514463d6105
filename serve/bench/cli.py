"""eagle-bench: how much sooner the same text comes."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import cast, get_args

from eagle_mlx import hub
from eagle_mlx.catalog import embedded
from eagle_mlx.cpu import blas
from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.extras import require
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.precision import described, in_dtype, quantization_of, quantize_for
from eagle_mlx.machine import describe
from eagle_mlx.target import Target, load_target
from eagle_mlx.target_options import add_target_arguments, options_of

from ..head_choice import usable_heads
from ..memory import add_kv_gb, add_prefill_chunk, bytes_of, prefill_chunk_of
from ..prompts import read_questions
from ..speculation import (
    AUTO,
    DEFAULT_TOKENS,
    NO_HEAD,
    PolicyName,
    add_head_bits,
    load_quantized,
    warn_of_head,
)
from . import report
from .baselines import MLX_LM, STOCK, StockModel
from .decoding import ModeName
from .dialogue import behind_filler, dialogues
from .identity import tolerance_for
from .measure import BenchConfig, measure, type_name
from .modes import DEFAULT_MODES, MODE_NAMES, NEEDS, USE_HEAD, EngineMode, Models, build_modes, random_head
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run eagle-bench; returns the exit status: 0, 1 where a text differs, 2 for an error, 130 when interrupted."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(given)
    try:
        return _bench(args, shlex.join(["eagle-bench", *given]))
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    default = BenchConfig()
    parser = argparse.ArgumentParser(
        prog="eagle-bench",
        description="Measure tokens/s, acceptance and identity of speculative decoding against plain decoding.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_what(parser.add_argument_group("what to measure"), default)
    _add_how(parser.add_argument_group("on what"), default)
    add_target_arguments(parser)
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    out.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them; trees of several sizes as curves")
    out.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser


def _add_what(what: argparse._ArgumentGroup, default: BenchConfig) -> None:
    what.add_argument("--target", help="folder or hub id of the model (default: the embedded one)")
    what.add_argument(
        "--head",
        help="folder or hub id of its head; auto, the default, as in eagle-serve; none; random: the worst there is",
    )
    add_head_bits(what)
    what.add_argument("--draft-model", metavar="MODEL", help="folder or hub id of a small model of the same tokenizer")
    what.add_argument(
        "--modes", nargs="+", choices=MODE_NAMES, help=f"default: all for which there are models, but {STOCK}"
    )
    what.add_argument("--batch", type=_positive, nargs="+", default=[1], metavar="N", help="rows at once (default 1)")
    what.add_argument(
        "--depth",
        type=_positive,
        nargs="+",
        metavar="K",
        help="draft tokens a round, the most where the policy adapts (default 4, with --policy throughput alone 8)",
    )
    what.add_argument(
        "--nodes",
        type=int,
        nargs="+",
        default=[0],
        metavar="N",
        help="tokens of a draft tree that is at most K deep; 0 for chains (default 0); --nodes 0 16 compares both",
    )
    what.add_argument(
        "--policy",
        nargs="+",
        choices=get_args(PolicyName),
        default=["fixed"],
        help="what decides how many of K are drafted (default fixed: all)",
    )
    what.add_argument(
        "--temperature", type=float, nargs="+", default=[default.temperature], metavar="T", help="default 0, greedy"
    )
    what.add_argument(
        "--acceptance", choices=("coupled", "rejection"), default=default.acceptance, help="of sampled drafts (coupled)"
    )


def _add_how(how: argparse._ArgumentGroup, default: BenchConfig) -> None:
    how.add_argument(
        "--prompts", type=Path, help="jsonl of `messages`, `prompt` or `turns` rows (default: held-out functions)"
    )
    add_prefill_chunk(how)
    add_kv_gb(how)
    how.add_argument(
        "--limit", type=_positive, default=100, help="prompts to take, evenly of all categories (default 100)"
    )
    how.add_argument(
        "--filler",
        type=_positive,
        metavar="N",
        help="put N tokens of text before each prompt, another text each: what a long context does to drafting",
    )
    how.add_argument(
        "--max-tokens",
        type=_positive,
        default=default.max_tokens,
        help=f"new tokens each (default {default.max_tokens})",
    )
    how.add_argument("--ignore-eos", action="store_true", help="let every continuation be --max-tokens long")
    how.add_argument("--repeats", type=_positive, default=default.repeats, help=f"default {default.repeats}")
    how.add_argument(
        "--turn",
        type=_positive,
        default=default.turn,
        metavar="N",
        help="let the modes change over after every N tokens a row rather than after whole prompts, where a machine's "
        "speed varies; mlx-lm-batch has one long turn",
    )
    how.add_argument("--seed", type=int, default=default.seed, help="of the first prompt when sampling (default 0)")
    how.add_argument(
        "--least-distinct",
        type=float,
        default=default.least_distinct,
        metavar="R",
        help=f"leave out continuations with a smaller share of distinct 4-grams (default {default.least_distinct})",
    )
    how.add_argument(
        "--tolerance", type=float, help="excuse a first difference where the two best logits are closer than this"
    )
    how.add_argument(
        "--prior",
        action="store_true",
        help="with --policy throughput: begin with what was learnt on this machine before, and keep what is learnt",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _bench(args: argparse.Namespace, command: str) -> int:
    if args.plot is not None:
        require("eagle-bench --plot", "train", "matplotlib")
    options, name = options_of(args), args.target or embedded("target")
    options.follow(name)
    print(f"blas: {blas.activate()}")
    for path in (args.json, args.plot):
        if path is not None:
            report.check_writable(path)
    chunk, kv_bytes = prefill_chunk_of(args), bytes_of("--kv-gb", args.kv_gb)
    modes, head_name = _modes(args)
    target = options.load(name)
    head = _head(head_name, target, args.head_bits)
    draft = load_target(args.draft_model) if args.draft_model is not None else None
    options.wire_active()
    configs = [_config(args, temperature) for temperature in args.temperature]
    questions = read_questions(args.prompts or embedded("prompts.jsonl"), args.limit)
    if args.filler is not None:
        questions = behind_filler(questions, target, args.filler)
    prompts = dialogues(questions, target, args.max_tokens)
    machine = describe()
    which = "none" if head is None else f"{head_name}, {described(head)}"
    print(f"machine: {machine}\ntarget: {target.name}\nhead: {which}")
    if draft is not None:
        print(f"draft model: {draft.name}")
    args.depth = args.depth or [min(DEFAULT_TOKENS[policy] for policy in args.policy)]
    runs: list[Run] = []
    stock = StockModel.load(name, options.adapter_path or None, options.trust_remote_code) if STOCK in modes else None
    models = Models(target, head, draft, kv_bytes, chunk, args.prior, stock)
    for config in configs:
        built = build_modes(models, modes, args.batch, args.depth, args.policy, args.nodes)
        runs += measure(target, built, prompts, config, progress=not args.quiet)
        for mode in built:
            if isinstance(mode, EngineMode) and mode.prior is not None:
                mode.prior.save()
    tolerance = tolerance_for(target) if args.tolerance is None else args.tolerance
    print(f"\n{report.table(runs)}\n\n{report.by_category(runs)}{report.footnote(runs, args.max_tokens, tolerance)}")
    extra: dict[str, object] = {
        "command": command,
        "eagle_mlx": version("eagle-mlx"),
        "prompts": str(args.prompts or embedded("prompts.jsonl")),
        "head_sha256": _digest(head_name),
        "head_quantization": quantization_of(head) if head is not None else None,
        "filler": args.filler or 0,
        "max_tokens": args.max_tokens,
        "acceptance": args.acceptance,
        "repeats": args.repeats,
        "turn": args.turn,
        "tolerance": tolerance,
    }
    if args.json is not None:
        head_text = str(head_name) if head_name is not None else None
        report.write_json(report.document(target.name, head_text, machine, runs, **extra), args.json)
    if args.plot is not None:
        report.plot(runs, args.plot)
    own = type_name(target.dtype)
    return 1 if any(run.identical is False and run.dtype == own for run in runs) else 0


def _head(name: str | Path | None, target: Target, bits: int | None) -> DraftHead | None:
    """The head as it drafts, in the target's type, None without a name."""
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
    """Of the head's weights, so that figures can be told to be those of a head."""
    return None if name is None or name == "random" else hub.weights_digest(hub.resolve(name))


def _modes(args: argparse.Namespace) -> tuple[list[ModeName], str | Path | None]:
    """The modes to run and the head that they need, None where they need none."""
    head = _head_name(args)
    given = {"--head": head is not None, "--draft-model": args.draft_model is not None}
    given["--head or --draft-model"] = any(given.values())
    if args.modes is None:
        if head is None:
            print("no head for this target: leaving out mode eagle")
        modes = [name for name in DEFAULT_MODES if name not in NEEDS or given[NEEDS[name]]]
        modes = [name for name in modes if args.shard == "none" or not name.startswith(MLX_LM)]
    else:
        modes = cast("list[ModeName]", list(args.modes))
    for name in modes:
        if name in NEEDS and not given[NEEDS[name]]:
            raise ConfigError(f"mode {name} needs {NEEDS[name]}; give it, or leave {name} out of --modes")
        if args.shard != "none" and name.startswith(MLX_LM):
            raise ConfigError(f"mode {name} does not go with --shard: mlx-lm would run a part of the target alone")
    return modes, head if not set(modes).isdisjoint(USE_HEAD) else None


def _head_name(args: argparse.Namespace) -> str | Path | None:
    """The head that is named, the embedded one, or the first that is found; None where no mode needs one."""
    if args.head not in (None, AUTO) or set(args.modes or MODE_NAMES).isdisjoint(USE_HEAD):
        return None if args.head in (AUTO, NO_HEAD) else args.head
    if args.target is None:
        return embedded("head")
    found = next(usable_heads(args.target, print), None)
    if found is not None:
        print(f"head: {found.reason}")
    return found.head if found is not None else None


def _config(args: argparse.Namespace, temperature: float) -> BenchConfig:
    return BenchConfig(
        max_tokens=args.max_tokens,
        temperature=temperature,
        repeats=args.repeats,
        seed=args.seed,
        least_distinct=args.least_distinct,
        ignore_eos=args.ignore_eos,
        acceptance=args.acceptance,
        tolerance=args.tolerance,
        turn=args.turn,
    )


if __name__ == "__main__":
    sys.exit(main())
