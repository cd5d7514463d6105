"""Train all kinds of heads on the same hidden states, for equal time and on equal tokens, and compare them.

    python checkpoints/scripts/compare_kinds.py --minutes 5 --tokens 600000 --output out/kinds

Writes comparison.json, comparison.md, and the heads with their training reports. The recipes are demo*.yaml in the
parent folder; for another target, give a folder with files of these names. There are no evaluations during training, so
all of the time is for training. No checkpoint is chosen: the final head decodes the first prompts of prompts.jsonl
greedily. Continuations that loop are left out, of τ and of speeds. Speeds are taken at the end, at one row, for all
heads in turn: the median ratio to plain decoding, at the depth with the highest.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_mlx import blas
from eagle_mlx.cpu import tune_process
from eagle_mlx.engine import Engine
from eagle_mlx.errors import EagleError
from eagle_mlx.files import new_folder
from eagle_mlx.formats.tensors import weights_of
from eagle_mlx.heads import KINDS, load_head
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.hidden_states import Example
from eagle_mlx.machine import describe
from eagle_mlx.policy import FixedPolicy
from eagle_mlx.proposers.head import HeadProposer
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.serve.prompts import read_questions
from eagle_mlx.target import Target, load_target
from eagle_mlx.text import is_loop
from eagle_mlx.train.config import TrainSettings, load_config
from eagle_mlx.train.data import Batches, InMemory, TrainData, training_data
from eagle_mlx.train.evaluation import Acceptance, Evaluator
from eagle_mlx.train.kind_settings import KIND_SETTINGS
from eagle_mlx.train.kinds import aux_layers_of, resolve
from eagle_mlx.train.run import LAST, data_fingerprint, set_up, train

CHECKPOINTS = Path(__file__).resolve().parents[1]
RECIPES = {
    "eagle3": "demo.yaml",
    "eagle": "demo-eagle.yaml",
    "mtp": "demo-mtp.yaml",
    "dspark": "demo-block.yaml",
    "dflash": "demo-block.yaml",
    "peagle": "demo-peagle.yaml",
}
BATCH = 8
"""Prompts decoded at a time. Acceptance does not depend on it."""
PASSES = 3
"""Measurements of each speed; the median of their ratios counts."""
NEVER = 1 << 60


@dataclass(frozen=True)
class Row:
    """One head: its training and its figures."""

    kind: str
    budget: str
    """`time` or `tokens`."""
    tokens: int
    steps: int
    train_seconds: float
    parameters: int
    """The head's own parameters."""
    untrained: float
    """τ before training, at the depth of the training's evaluations."""
    by_depth: dict[int, Acceptance]
    speedup: float | None = None
    """Tokens per second relative to plain decoding; None if not timed."""
    best_depth: int = 0


def config_of(
    kind: str, args: argparse.Namespace, budget: str, output: Path, steps: int, target: Target
) -> TrainSettings:
    """Return a kind's recipe with one of the two budgets."""
    spans = {"time": {"minutes": args.minutes}, "tokens": {"minutes": 0.0, "max_steps": steps}}
    common = {"target": str(args.target), "output": str(output), "seed": args.seed, "limit": args.conversations}
    judged = {"eval_depth": args.depths[-1], "eval_tokens": args.max_tokens, "eval_steps": NEVER}
    settings = {**common, **judged, **spans[budget], "head": kind}
    return resolve(load_config(args.recipes / RECIPES[kind], settings), target.hidden_size)


def data_of(config: TrainSettings, captured: TrainData, target: Target) -> TrainData:
    """Return the same conversations with the states that a kind reads, and its draft vocabulary."""
    layers = aux_layers_of(target, config)
    samples = captured.samples
    narrow: list[Example] = []
    for index in range(len(samples.lengths)):
        sample = samples[index]
        assert sample.states is not None
        states = sample.states.of_layers(layers, target.num_layers - 1)
        narrow.append(dataclasses.replace(sample, states=states))
    if "draft_vocab" not in KIND_SETTINGS[config.head.kind].foreign:
        return TrainData(InMemory(narrow), layers, captured.kept, captured.report)
    report = {**captured.report, "draft_vocab": target.vocab_size, "draft_vocab_coverage": 1.0}
    return TrainData(InMemory(narrow), layers, None, report)


def steps_for(tokens: int, captured: TrainData, config: TrainSettings) -> int:
    """Return how many optimizer steps see about this many tokens. Batches are the same for every kind."""
    per_epoch = Batches(
        captured.samples, config.optimization.rows, config.optimization.length, config.run.seed
    ).steps_per_epoch()
    return max(1, round(tokens * per_epoch / sum(captured.samples.lengths)))


def run(args: argparse.Namespace, folder: Path) -> list[Row]:
    """Capture once, then train and measure each head."""
    target = load_target(args.target)
    questions = read_questions(args.prompts, args.limit)
    prompts = [question.encode(target, max_tokens=args.max_tokens) for question in questions]
    first = config_of("eagle3", args, "time", folder / "none", 0, target)
    configs = [config_of(kind, args, "time", folder / "none", 0, target) for kind in args.kinds]
    layers = sorted({layer for config in configs for layer in aux_layers_of(target, config)})
    captured = training_data(target, first.changed(aux_layers=tuple(layers), cache_gb=1e3), progress=True)
    steps = steps_for(args.tokens, captured, first)
    rows: list[Row] = []
    heads: list[DraftHead] = []
    for budget, amount in (("time", args.minutes), ("tokens", args.tokens)):
        for kind in args.kinds if amount else ():
            output = folder / f"{kind}-{budget}"
            print(f"\n== {KINDS[kind].title}, equal {budget}", flush=True)
            config = config_of(kind, args, budget, output, steps, target)
            data = data_of(config, captured, target)
            with set_up(target, config, data_fingerprint(data)) as setup:
                report = train(setup, data, prompts)
            heads.append(head := load_head(output / LAST, target))
            by_depth = {depth: measure(target, head, prompts, depth, args.max_tokens) for depth in args.depths}
            size = sum(weight.size for weight in weights_of(head).values())
            trained = report["tokens"], report["steps"], report["train_seconds"]
            rows.append(Row(kind, budget, *trained, size, report["untrained_acceptance_length"], by_depth))
    timed = without_loops(target, prompts, args.max_tokens)[: args.timed] if args.timed else []
    if not timed:
        return rows
    best = speedups(target, heads, timed, args.depths, args.max_tokens)
    return [
        dataclasses.replace(row, speedup=ratio, best_depth=depth)
        for row, (ratio, depth) in zip(rows, best, strict=True)
    ]


def without_loops(target: Target, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Return the prompts whose greedy continuation does not loop: in a loop, even a poor head's drafts are accepted."""
    outputs = Engine(target, max_batch=BATCH).generate(prompts, SamplingParams(max_tokens=max_tokens))
    return [prompt for prompt, output in zip(prompts, outputs, strict=True) if not is_loop(output.tokens)]


def speedups(
    target: Target, heads: Sequence[DraftHead], prompts: list[list[int]], depths: Sequence[int], max_tokens: int
) -> list[tuple[float, int]]:
    """Return each head's highest speed relative to plain decoding, greedy at one row, and its depth."""
    params = SamplingParams(max_tokens=max_tokens)
    ways = [(head, depth) for head in heads for depth in depths]
    plain = Engine(target, max_batch=1)
    engines = [Engine(target, HeadProposer(head), policy=FixedPolicy(depth), max_batch=1) for head, depth in ways]

    def seconds(engine: Engine) -> float:
        start = time.perf_counter()
        engine.generate(prompts, params)
        return time.perf_counter() - start

    ratios_of: list[list[float]] = [[] for _ in engines]
    for number in range(PASSES + 1):
        for engine, ratios in zip(engines, ratios_of, strict=True):
            ratio = seconds(plain) / seconds(engine)
            if number:  # the first pass compiles
                ratios.append(ratio)
    medians = [(statistics.median(ratios), depth) for ratios, (_, depth) in zip(ratios_of, ways, strict=True)]
    return [max(medians[at : at + len(depths)]) for at in range(0, len(medians), len(depths))]


def measure(target: Target, head: Any, prompts: list[list[int]], depth: int, max_tokens: int) -> Acceptance:
    acceptance = Evaluator(target, prompts, depth, max_tokens, BATCH).measure(head)
    print(f"depth {depth}: τ {acceptance.acceptance_length:.3f}", flush=True)
    return acceptance


def table(rows: Sequence[Row], depths: Sequence[int]) -> str:
    """Return a Markdown table with a line per head: τ by depth, and acceptance by position at the largest depth."""
    heads = ["kind", "equal", "tokens", "seconds", "parameters", *(f"τ at depth {d}" for d in depths)]
    heads += [f"accepted by position at depth {depths[-1]}", "times plain (depth)"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        by_position = " ".join(f"{a:.2f}" for a in row.by_depth[depths[-1]].acceptance_by_position)
        cells = [KINDS[row.kind].title, row.budget, f"{row.tokens:,}", f"{row.train_seconds:.0f}"]
        cells += [f"{row.parameters / 1e6:.2f} M", *(f"{row.by_depth[d].acceptance_length:.2f}" for d in depths)]
        cells += [by_position, "" if row.speedup is None else f"{row.speedup:.2f} ({row.best_depth})"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(rows: Sequence[Row], args: argparse.Namespace, folder: Path) -> str:
    """Write comparison.json and comparison.md; return the latter's text."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    recipes = {kind: (args.recipes / RECIPES[kind]).read_text(encoding="utf-8") for kind in args.kinds}
    figures = {
        "rows": [dataclasses.asdict(row) for row in rows],
        "settings": settings,
        "recipes": recipes,
        "machine": vars(describe()),
    }
    (folder / "comparison.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    first = rows[0].by_depth[args.depths[0]]
    text = table(rows, args.depths) + (
        "\n\nτ: tokens emitted per target forward, bonus token included; greedy, "
        f"{args.max_tokens} tokens after each of {first.prompts} held-out prompts, {first.left_out} more left out "
        f"because their continuation loops. Seed {args.seed}.\n"
    )
    (folder / "comparison.md").write_text(text, encoding="utf-8")
    return text


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/kinds"), help="a new folder")
    parser.add_argument("--overwrite", action="store_true", help="replace it if it exists")
    parser.add_argument("--target", type=Path, default=CHECKPOINTS / "target")
    parser.add_argument("--prompts", type=Path, default=CHECKPOINTS / "prompts.jsonl")
    parser.add_argument("--recipes", type=Path, default=CHECKPOINTS, help="folder of demo*.yaml (checkpoints)")
    parser.add_argument("--kinds", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--minutes", type=float, default=5.0, help="of training, for equal time; 0 for none (5)")
    parser.add_argument("--tokens", type=int, default=600_000, help="for equal tokens; 0 for none (600000)")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4], help="draft tokens a round (1 2 3 4)")
    parser.add_argument("--conversations", type=int, default=6000, help="to learn from (6000)")
    parser.add_argument("--limit", type=int, default=100, help="held-out prompts (100)")
    parser.add_argument("--max-tokens", type=int, default=128, help="decoded for each of them (128)")
    parser.add_argument("--timed", type=int, default=8, help="prompts in each measurement of speed; 0 for none (8)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not (args.minutes or args.tokens):
        parser.error("give --minutes, --tokens or both")
    return args


def main() -> int:
    args = parse_arguments()
    print(f"blas: {blas.activate()}")
    tune_process()
    try:
        with new_folder(args.output, args.overwrite) as folder:
            text = write(run(args, folder), args, folder)
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind", file=sys.stderr)
        return 130
    print(f"\n{text}\nwritten: {args.output}/comparison.json, comparison.md and the heads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
