"""Compare eagle-train with the trainer of the `speculators` package: same captured tokens, same size of head.

    python benchmarks/compare_speculators.py --shards out/shards --python /path/to/venv/bin/python --output out/compare

The trainers take turns of some steps, so other load on the machine affects both alike. Then each head decodes the same
held-out prompts with our engine. README.md in this folder says what is equal, what is not, and what speculators needs
on a CPU. Writes comparison.json, comparison.md and the heads.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from eagle_mlx import blas
from eagle_mlx.cpu import tune_process
from eagle_mlx.errors import EagleError
from eagle_mlx.files import new_folder
from eagle_mlx.formats.tensors import weights_of
from eagle_mlx.heads import load_head
from eagle_mlx.machine import describe
from eagle_mlx.serve.prompts import read_questions
from eagle_mlx.target import Target, load_target
from eagle_mlx.train.config import TrainSettings, load_config
from eagle_mlx.train.data import Batches, TrainData, training_data
from eagle_mlx.train.evaluation import Acceptance, Evaluator
from eagle_mlx.train.kinds import resolve

# isort: split
# After eagle_mlx, which must be imported before MLX so that MLX gets OpenBLAS.
from contestants import Contestant, Ours, Speculators, Turn, common_flags, convert, our_settings, write_vocabulary
from pieces import Pieces, timed

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
VARIANTS = ("defaults", "our-settings")
VOCABULARY = "logits, softmax and loss over the vocabulary"
ATTENTION = "attention"
OPTIMIZER = "clipping, optimizer and bookkeeping"
DATA = "waiting for data"
REST = "projections, MLP, norms and all else"
PROFILED = 4
"""Steps in the round under torch's profiler, and in the round before it."""
PIECES = 8
"""Number of batches for measuring our pieces."""
BATCH = 8
"""Prompts decoded at a time. Acceptance does not depend on it."""


def take_turns(contestants: list[Contestant], steps: int) -> dict[str, list[Turn]]:
    """Run turns until all trainers have used all data. A warm-up round and a profiled round come first."""
    turns: dict[str, list[Turn]] = {contestant.name: [] for contestant in contestants}
    number, going = 0, list(contestants)
    while going:
        first = number % len(going)
        for contestant in going[first:] + going[:first]:
            turn = contestant.turn(steps if number > 1 else PROFILED, profile=number == 1)
            if turn is None:
                going = [other for other in going if other is not contestant]
                continue
            turns[contestant.name].append(turn)
            print(
                f"{contestant.name}: {sum(t.steps for t in turns[contestant.name])} steps, loss {turn.loss:.3f}, "
                f"{turn.tokens / turn.seconds:.0f} tokens/s, {turn.tokens / turn.cpu_seconds:.0f} per CPU second",
                flush=True,
            )
        number += 1
    return turns


def profile_ours(ours: Ours, target: Target, data: TrainData, config: TrainSettings, waits: float) -> dict[str, float]:
    """Return shares of a step, from pieces timed alone on some batches. `waits` is the share of waiting for data."""
    pieces = Pieces(ours.head, target, config)
    rounds: list[dict[str, float]] = []
    with contextlib.closing(
        Batches(data.samples, config.optimization.rows, config.optimization.length, config.run.seed).epoch(1)
    ) as stream:
        for rows in itertools.islice(stream, PIECES + 1):
            runs: dict[str, Callable[[], Any]] = {
                "head": pieces.head_both_ways(rows),
                "vocabulary": pieces.vocabulary(rows),
                "attention": pieces.attention(rows),
                "step": partial(ours.stepper, rows, 0.0),
            }
            rounds.append({name: timed(run).cpu_seconds for name, run in runs.items()})
    seconds = {name: float(np.median([turn[name] for turn in rounds[1:]])) for name in rounds[0]}
    whole = seconds["step"] or 1.0
    shares = {
        VOCABULARY: seconds["vocabulary"] / whole,
        ATTENTION: seconds["attention"] / whole,
        OPTIMIZER: (whole - seconds["head"]) / whole,
    }
    return {**shares, DATA: waits, REST: 1 - sum(shares.values()) - waits}


def profile_theirs(trainer: Speculators, vocabulary: int, length: int, turns: list[Turn]) -> dict[str, float]:
    """Return shares of a step by torch's profiler. Shapes identify operations; data and optimizer are timed."""
    operations = json.loads(trainer.operations.read_text(encoding="utf-8"))
    seconds = dict.fromkeys((VOCABULARY, ATTENTION, REST), 0.0)
    for operation in operations:
        seconds[kind_of_operation(operation, vocabulary, length)] += operation["seconds"]
    whole = sum(seconds.values()) or 1.0
    waits, updates = share(turns, "fetch"), share(turns, "opt")
    shares = {name: (1 - waits) * seconds[name] / whole for name in (VOCABULARY, ATTENTION)}
    return {**shares, OPTIMIZER: updates, DATA: waits, REST: 1 - sum(shares.values()) - updates - waits}


def kind_of_operation(operation: dict[str, Any], vocabulary: int, length: int) -> str:
    """Return which part an operation of torch's profiler belongs to. Masks are [.., length, a multiple of length]."""
    shapes = [shape for shape in operation["shapes"] if all(isinstance(size, int) for size in shape)]
    masks = [shape for shape in shapes if len(shape) in (2, 4) and shape[-2] == length and shape[-1] % length == 0]
    heads = [shape for shape in shapes if len(shape) == 4]
    if "attention" in operation["name"] or any(len(shape) == 4 or shape[-1] == length for shape in masks):
        return ATTENTION
    return VOCABULARY if not heads and any(vocabulary in shape for shape in shapes) else REST


def speed(turns: list[Turn], against: list[Turn]) -> dict[str, float]:
    """Return medians over the turns without warm-up and profiling, and the median ratio to another trainer's turns."""
    counted, others = turns[2:] or turns, against[2:] or against
    ratios = [
        (turn.tokens / turn.seconds) / (other.tokens / other.seconds)
        for turn, other in zip(counted, others, strict=False)
    ]
    return {
        "tokens_per_second": float(np.median([turn.tokens / turn.seconds for turn in counted])),
        "tokens_per_cpu_second": sum(turn.tokens for turn in counted) / sum(turn.cpu_seconds for turn in counted),
        "ratio": float(np.median(ratios)),
    }


def share(turns: list[Turn], phase: str) -> float:
    """Return the share of the time that a trainer reports for a phase."""
    counted = turns[2:] or turns
    return sum(turn.phases.get(phase, 0.0) for turn in counted) / sum(sum(turn.phases.values()) for turn in counted)


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train, decode and profile. Return the figures."""
    target = load_target(args.target)
    limits = {"minutes": 0.0, "epochs": 1, "max_steps": args.max_steps, "seed": args.seed}
    settings = {"target": str(args.target), "shards": str(args.shards), **limits}
    config = resolve(load_config(args.config, settings), target.hidden_size)
    data = training_data(target, config)
    args.work.mkdir(parents=True, exist_ok=True)
    ratio = convert(args.python, args.shards, args.work)
    flags = common_flags(config, data, args.work, ratio) + write_vocabulary(data, target.vocab_size, args.work)
    theirs: list[Speculators] = []
    try:
        for name in args.variants:
            extra = our_settings(config) if name == "our-settings" else []
            theirs.append(Speculators(f"speculators-{name}", args.python, args.threads, folder, flags + extra))
        ours = Ours(target, data, config, folder)
        contestants: list[Contestant] = [ours, *theirs]
        turns = take_turns(contestants, args.turn)
        heads = {contestant.name: contestant.finish() for contestant in contestants}
    finally:
        for trainer in theirs:
            trainer.stop()
    length = config.optimization.rows * config.optimization.length
    vocabulary = target.vocab_size if data.kept is None else len(data.kept)
    profiles = {trainer.name: profile_theirs(trainer, vocabulary, length, turns[trainer.name]) for trainer in theirs}
    profiles[ours.name] = profile_ours(ours, target, data, config, share(turns[ours.name], "fetch"))
    questions = read_questions(args.prompts, args.limit)
    prompts = [question.encode(target, max_tokens=args.max_tokens) for question in questions]
    return {
        "rows": [
            {
                **row(name, turns, ours.name),
                **measure(target, heads[name], prompts, args),
                "profile": profiles[name],
                "turns": [dataclasses.asdict(turn) for turn in turns[name]],
            }
            for name in turns
        ],
        "speculators_flags": flags,
        "our_settings": our_settings(config),
        "data": data.report,
    }


def row(name: str, turns: dict[str, list[Turn]], first: str) -> dict[str, Any]:
    """Return a trainer's figures, and its speed relative to the first."""
    done = turns[name]
    tokens, steps = sum(turn.tokens for turn in done), sum(turn.steps for turn in done)
    return {"name": name, "tokens": tokens, "steps": steps, **speed(done, turns[first])}


def measure(target: Target, folder: Path, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Return acceptance with our engine, and the head's size without a copy of the target's embedding."""
    head: Any = load_head(folder, target)
    acceptance: Acceptance = Evaluator(target, prompts, args.depth, args.max_tokens, BATCH).measure(head)
    print(f"{folder}: τ {acceptance.acceptance_length:.3f}", flush=True)
    own = {name: weight for name, weight in weights_of(head).items() if not name.startswith("embed_tokens")}
    return {"acceptance": dataclasses.asdict(acceptance), "parameters": sum(weight.size for weight in own.values())}


def table(comparison: dict[str, Any]) -> str:
    """Return Markdown tables of the trainers, and of where their time goes."""
    rows = comparison["rows"]
    titles = ("trainer", "tokens", "steps", "tokens/s", "of eagle-train", "tokens per CPU second", "parameters", "τ")
    lines = ["| " + " | ".join([*titles, "accepted by position"]) + " |", "|---" * 9 + "|"]
    for row in rows:
        took, by_position = row["acceptance"], " ".join(f"{a:.2f}" for a in row["acceptance"]["acceptance_by_position"])
        lines.append(
            f"| {row['name']} | {row['tokens']:,} | {row['steps']} "
            f"| {row['tokens_per_second']:.0f} | {row['ratio']:.2f} "
            f"| {row['tokens_per_cpu_second']:.0f} | {row['parameters'] / 1e6:.2f} M "
            f"| {took['acceptance_length']:.2f} | {by_position} |"
        )
    lines += ["", "| share of a step | " + " | ".join(row["name"] for row in rows) + " |"]
    lines.append("|---" * (len(rows) + 1) + "|")
    for part in (VOCABULARY, ATTENTION, REST, OPTIMIZER, DATA):
        lines.append(f"| {part} | " + " | ".join(f"{100 * row['profile'][part]:.0f} %" for row in rows) + " |")
    took = rows[0]["acceptance"]
    lines += [
        "",
        f"τ at depth {took['depth']}, greedy, {took['prompts']} prompts, {took['left_out']} left out as loops.",
    ]
    return "\n".join(lines) + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, required=True, help="folder of `eagle-data collect`")
    parser.add_argument("--python", type=Path, required=True, help="Python with torch and speculators")
    parser.add_argument("--output", type=Path, default=Path("out/compare"), help="a new folder")
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder if it exists")
    parser.add_argument(
        "--work", type=Path, default=Path("out/compare-work"), help="the data in speculators' format; kept"
    )
    parser.add_argument("--target", type=Path, default=CHECKPOINTS / "target")
    parser.add_argument("--prompts", type=Path, default=CHECKPOINTS / "prompts.jsonl")
    parser.add_argument("--config", type=Path, default=CHECKPOINTS / "head.yaml", help="our recipe")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS), help="to train")
    parser.add_argument("--max-steps", type=int, default=0, help="0 for one pass over the shards")
    parser.add_argument("--turn", type=int, default=20, help="steps per turn (20)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (2)")
    parser.add_argument("--limit", type=int, default=100, help="number of held-out prompts (100)")
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens per prompt (128)")
    parser.add_argument("--depth", type=int, default=4, help="draft tokens per round (4)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    for name in ("shards", "python", "work", "target"):
        setattr(args, name, getattr(args, name).absolute())
    print(f"blas: {blas.activate()}")
    tune_process()
    try:
        with new_folder(args.output, args.overwrite) as folder:
            comparison = run(args, folder)
            settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
            figures = {**comparison, "settings": settings, "machine": vars(describe())}
            (folder / "comparison.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
            (folder / "comparison.md").write_text(table(comparison), encoding="utf-8")
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(f"\n{table(comparison)}\nwritten: {args.output}/comparison.json, comparison.md and the heads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
