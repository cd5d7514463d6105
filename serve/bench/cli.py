"""eagle-bench: measure how much faster the same text is generated."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from eagle_mlx import Target, hub, load_target
from eagle_mlx.catalog import embedded
from eagle_mlx.command import arguments, exit_code, read
from eagle_mlx.cpu import blas
from eagle_mlx.errors import ConfigError, PromptError
from eagle_mlx.extras import require
from eagle_mlx.files import check_file
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.eagle3 import random_head
from eagle_mlx.heads.precision import described, in_dtype, quantization_of, quantize_for
from eagle_mlx.machine import describe
from eagle_mlx.sampling_params import limit_of
from eagle_mlx.setting import AT_LEAST_1, Group, between, find, flag, setting
from eagle_mlx.target_options import TargetOptions

from .. import speculation
from ..memory_options import MemoryOptions
from ..prompts import Question, read_questions, with_filler
from . import report
from .decoding import ModeName, tolerance_for
from .measure import BenchConfig, measure, type_name
from .modes import DEFAULT_MODES, MLX_LM, NEEDS, STOCK, USE_HEAD, BenchModels, StockModel, build_modes, missing
from .race import race
from .report import BenchRun

RANDOM = "random"
"""The value of `--head` for random weights: the worst case."""
EPILOG = """\
examples:
  eagle-bench                                   the embedded target and head on the embedded prompts
  eagle-bench --depth 1 2 4 6 --modes mlx-lm eagle
  eagle-bench --target mlx-community/Qwen3-4B-4bit --head out/head --prompts mine.jsonl --json figures.json
  eagle-bench --batch 1 4 8 --temperature 0 0.7
  eagle-bench --target Qwen3-4B-4bit --prompts spec_bench.jsonl --limit 80      τ and tokens/s by category
  eagle-bench --race 'def median(values):'              one prompt by each mode, side by side
  eagle-bench --head random --modes plain eagle --policy throughput     the cost of a useless head

All modes decode the same prompts in turns. Figures are medians over the repeats. mlx-lm and mlx-lm-draft decode one
prompt at a time; mlx-lm-batch is measured for each batch above 1. Texts are compared with mlx-lm's greedy text or,
above temperature 0 and with --exact, with the plain engine's text for the same seeds.

All modes except mlx-lm-stock share one model, as EAGLE-MLX loads it. mlx-lm-stock decodes a second copy in the folder's
own type. If the types differ, near-ties may resolve differently; this does not change the exit status.

--race runs one mode at a time; at a terminal, a replay then shows all of them, and Ctrl-C skips it. hybrid is what
eagle-generate and eagle-serve do by default: the head and n-grams, whichever is faster."""


@dataclass(frozen=True)
class BenchOptions(Group):
    """What to measure, and on what."""

    target: str | None = setting(None, speculation.TARGET_HELP, metavar="MODEL")
    head: str | None = setting(
        None,
        "folder or hub id of the head; auto (the default) finds one, as in eagle-serve; none uses no head; "
        "random is the worst case",
    )
    head_bits: speculation.HeadBits | None = setting(None, speculation.HEAD_BITS)
    draft_model: str | None = setting(
        None, "folder or hub id of a small model with the same tokenizer", metavar="MODEL", also=("draft_model_path",)
    )
    modes: tuple[ModeName, ...] | None = setting(
        None, f"ways to decode (default: all for which you give a model, except {STOCK})"
    )
    batch: tuple[int, ...] = setting((1,), "rows that decode together", AT_LEAST_1)
    depth: tuple[int, ...] | None = setting(
        None,
        "draft tokens per round; the maximum if the policy adapts (default: 4, or 8 if the only policy is throughput)",
        between(1, 20),
        metavar="K",
    )
    nodes: tuple[int, ...] = setting(
        (0,),
        "tokens in a draft tree of up to --depth levels; 0 drafts chains; --nodes 0 16 compares both",
        speculation.NODES,
    )
    policy: tuple[speculation.PolicyName, ...] | None = setting(
        None,
        "how to choose the number of draft tokens, up to --depth; fixed always drafts --depth tokens (default: fixed; "
        "throughput with --race)",
    )
    temperature: tuple[float, ...] = setting(
        (BenchConfig.temperature,), "sampling temperature; 0 is greedy", limit_of("temperature"), metavar="T"
    )
    prompts: Path | None = setting(
        None, "jsonl file of rows with `messages`, `prompt` or `turns` (default: held-out Python functions)"
    )
    race: str | None = setting(
        None, "show one prompt's decoding by each mode side by side; modes run one at a time", metavar="PROMPT"
    )
    limit: int = setting(100, "number of prompts, spread evenly over categories", AT_LEAST_1)
    filler: int | None = setting(
        None,
        "put N tokens of text before each prompt; a different text each time, to measure long contexts",
        AT_LEAST_1,
    )
    prior: bool = setting(
        False, "with --policy throughput: start from the target's cost curve; it is measured at the start and saved"
    )
    json: Path | None = setting(None, "write the figures to this file")
    plot: Path | None = setting(None, "draw the figures as a bar chart", metavar="FILE.png")
    quiet: bool = setting(False, "no progress bars")
    measuring: BenchConfig = field(default_factory=BenchConfig)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    loading: TargetOptions = field(default_factory=TargetOptions)

    def _check(self) -> None:
        if self.race is None:
            return
        if not self.race.strip():
            raise PromptError("the prompt of --race is empty; give some text")
        for name in ("batch", "prompts", "limit", "json", "plot", "repeats", "turn"):
            if self.value(name) != find(BenchOptions, name).default:
                raise ConfigError(f"--race decodes one prompt once and only prints; leave out {flag(name)}")

    @property
    def policies(self) -> tuple[speculation.PolicyName, ...]:
        return self.policy or ("fixed" if self.race is None else "throughput",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run eagle-bench. Return the exit status: 0, 1 if a text differs, 2 for an error, 130 if interrupted."""
    given = arguments(argv)
    about = "Compare tokens/s, acceptance and texts of speculative decoding with plain decoding."
    command = shlex.join(["eagle-bench", *given])
    return exit_code(lambda: _bench(read(BenchOptions, given, "eagle-bench", about, EPILOG), command))


def _bench(options: BenchOptions, command: str) -> int:
    if options.plot is not None:
        require("eagle-bench --plot", "train", "matplotlib")
    loading, name = options.loading, options.target or embedded("target")
    loading.follow(name)
    for path in filter(None, (options.json, options.plot)):
        check_file(path)
    print(f"blas: {blas.activate()}")
    modes, head_name = _modes(options)
    say = partial(print, file=sys.stderr) if not options.quiet else lambda text: None
    say(f"loading {' and '.join(str(each) for each in (name, head_name, options.draft_model) if each)}")
    target = loading.load(name)
    head = _head(head_name, target, options.head_bits)
    draft = load_target(options.draft_model) if options.draft_model is not None else None
    loading.wire_active()
    questions = _questions(options, target)
    machine = describe()
    which = "none" if head is None else f"{head_name}, {described(head)}"
    print(f"machine: {machine}\ntarget: {target.name}\nhead: {which}")
    if draft is not None:
        print(f"draft model: {draft.name}")
    depth = options.depth or (min(speculation.DEFAULT_TOKENS[policy] for policy in options.policies),)
    runs: list[BenchRun] = []
    stock = StockModel(name, loading.adapter_path or None, loading.trust_remote_code) if STOCK in modes else None
    models = BenchModels(target, head, draft, options.memory, options.prior or options.race is not None, stock)
    if options.race is not None:
        return _race(options, models, modes, depth, questions[0])
    for temperature in options.temperature:
        say("preparing the modes")
        built = build_modes(models, modes, options.batch, depth, options.policies, options.nodes)
        config = replace(options.measuring, temperature=temperature)
        runs += measure(target, built, questions, config, progress=not options.quiet)
    own = options.measuring.tolerance
    tolerance = tolerance_for(target) if own is None else own
    footnote = report.footnote(runs, options.measuring.max_tokens, tolerance)
    print(f"\n{report.table(runs)}\n\n{report.by_category(runs)}{footnote}")
    if options.json is not None:
        figures = {
            "target": target.name,
            "head": None if head_name is None else str(head_name),
            "machine": asdict(machine),
            "command": command,
            "eagle_mlx": version("eagle-mlx"),
            "prompts": str(options.prompts or embedded("prompts.jsonl")),
            "head_sha256": None if head_name in (None, RANDOM) else hub.weights_digest(hub.resolve(head_name)),
            "head_quantization": quantization_of(head) if head is not None else None,
            "filler": options.filler or 0,
            **options.measuring.flat(),
            "tolerance": tolerance,
            "runs": list(map(asdict, runs)),
        }
        report.write_json(figures, options.json)
    if options.plot is not None:
        report.plot(runs, options.plot)
    dtype = type_name(target.dtype)
    return 1 if any(run.identical is False and run.dtype == dtype for run in runs) else 0


def _questions(options: BenchOptions, target: Target) -> list[Question]:
    if options.race is None:
        questions = read_questions(options.prompts or embedded("prompts.jsonl"), options.limit)
    else:
        has_template = target.tokenizer is not None and target.tokenizer.has_chat_template
        questions = [Question([{"role": "user", "content": options.race}] if has_template else options.race)]
    return questions if options.filler is None else with_filler(questions, target, options.filler)


def _race(
    options: BenchOptions, models: BenchModels, modes: Sequence[ModeName], depth: Sequence[int], question: Question
) -> int:
    same = True
    for temperature in options.temperature:
        config = replace(options.measuring, temperature=temperature)
        [params] = config.params(1, config.max_tokens)
        prompt = question.encode(models.target, max_tokens=config.max_tokens)
        built = build_modes(models, modes, (1,), depth, options.policies, options.nodes)
        config.check(built)
        same &= race(models.target, built, prompt, params, not options.quiet)
    return 0 if same else 1


def _head(name: str | Path | None, target: Target, bits: int | None) -> DraftHead | None:
    if name is None:
        if bits is not None:
            raise ConfigError("--head-bits needs a --head and a mode that uses it, such as eagle")
        return None
    if name == RANDOM:
        head: DraftHead = random_head(target)
        quantize_for(head, target, bits)
        return head
    return in_dtype(speculation.load_head(name, target, bits), target.dtype)


def _modes(options: BenchOptions) -> tuple[list[ModeName], str | Path | None]:
    """Return the modes to run, and the head that they need or None."""
    head = _head_name(options)
    modes = list(options.modes or DEFAULT_MODES)
    for_mlx_lm = [name for name in modes if name.startswith(MLX_LM)]
    given = {"--head": head, "--draft-model": options.draft_model}
    lacking = [name for name in modes if name in NEEDS and not any(given[flag] for flag in NEEDS[name])]
    is_sharded = options.loading.shard != "none"
    if options.modes is None:
        if head is None:
            print("no head for this target: leaving out mode eagle")
        left_out = [*lacking, *(for_mlx_lm if is_sharded or options.race is not None else ())]
        modes = [name for name in modes if name not in left_out]
    elif lacking:
        raise missing(lacking[0])
    elif is_sharded and for_mlx_lm:
        raise ConfigError(f"mode {for_mlx_lm[0]} does not work with --shard: mlx-lm would run one part of the target")
    return modes, head if not set(modes).isdisjoint(USE_HEAD) else None


def _head_name(options: BenchOptions) -> str | Path | None:
    """Return the named head, the embedded one, or the first one found; None if no mode needs one."""
    if options.head not in (None, speculation.AUTO) or set(options.modes or USE_HEAD).isdisjoint(USE_HEAD):
        return None if options.head in (speculation.AUTO, speculation.NO_HEAD) else options.head
    if options.target is None:
        return embedded("head")
    found = next(speculation.usable_heads(options.target, print), None)
    if found is not None:
        print(f"head: {found.about}")
    return found.head if found is not None else None


if __name__ == "__main__":
    sys.exit(main())
