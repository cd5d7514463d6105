"""Train a head for a few minutes, decode with it and with the included head, and show the gain.

    python checkpoints/scripts/demo.py --output out/demo

Writes the head with its training plots, report.json and summary.png. Replaces an earlier demo at the same place once
the new one is complete.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np

import eagle_mlx as em
from eagle_mlx.cpu import blas
from eagle_mlx.errors import EagleError, OutputError
from eagle_mlx.files import new_folder
from eagle_mlx.heads.eagle3 import Eagle3Head
from eagle_mlx.machine import describe
from eagle_mlx.serve.bench import report
from eagle_mlx.serve.bench.measure import BenchConfig, measure
from eagle_mlx.serve.bench.modes import Models, build_modes
from eagle_mlx.serve.bench.report import Run
from eagle_mlx.serve.prompts import read_questions
from eagle_mlx.text import is_loop
from eagle_mlx.train.kinds import KINDS

CHECKPOINTS = Path(__file__).resolve().parents[1]
TAU_BATCH = 8
"""Rows decoded at a time to measure acceptance lengths, which do not depend on it."""


@dataclass(frozen=True)
class Taus:
    """Acceptance lengths of three heads on the same prompts."""

    untrained: float
    demo: float
    shipped: float


def train(target: Path, config: Path, minutes: float | None, output: Path) -> float:
    """Run eagle-train in a separate process; return its seconds. Raises EagleError if it fails."""
    command = [sys.executable, "-m", "eagle_mlx.train.cli", "--target", str(target), "--output", str(output)]
    command += ["-c", str(config), *(["--minutes", str(minutes)] if minutes is not None else [])]
    start = time.perf_counter()
    status = subprocess.run(command, check=False).returncode
    if status:
        raise EagleError(f"training ended with exit status {status}; its own message stands above")
    return time.perf_counter() - start


def untrained_like(head: Eagle3Head, target: em.Target) -> Eagle3Head:
    """Return an untrained head with the shape and draft vocabulary of the given one."""
    kept = None if head.token_ids is None else np.array(head.token_ids, np.int64)
    return KINDS["eagle3"].untrained(target, head.config, kept, seed=0)


def tau(target: em.Target, head: Eagle3Head, prompts: list[list[int]], config: BenchConfig, depth: int) -> float:
    """Return a head's τ over the continuations that do not loop."""
    engine = em.Engine(target, em.HeadProposer(head), policy=em.FixedPolicy(depth), max_batch=TAU_BATCH)
    said = engine.generate(prompts, config.params(len(prompts), config.max_tokens), progress=True)
    kept = [one for one in said if not is_loop(one.tokens, config.least_distinct)]
    return sum(len(one.tokens) for one in kept) / max(1, sum(one.rounds for one in kept))


def trained_head(folder: Path) -> Path:
    """Return the best checkpoint in an eagle-train output folder."""
    for candidate in (folder / "best", folder):
        if (candidate / "config.json").is_file():
            return candidate
    raise EagleError(f"training left no head in {folder}")


def run(args: argparse.Namespace, folder: Path) -> None:
    began = time.perf_counter()
    title("1 of 3: train an EAGLE-3 head from scratch")
    train_seconds = train(args.target, args.config, args.minutes, folder / "head")

    title("2 of 3: decode held-out prompts, plainly and with the head that ships")
    target = em.load_target(args.target)
    shipped = em.load_head(args.head, target)
    demo = em.load_head(trained_head(folder / "head"), target)
    config = BenchConfig(max_tokens=args.max_tokens, repeats=1)
    questions = read_questions(args.prompts, args.limit)
    runs = measure(
        target, build_modes(Models(target, shipped), ["mlx-lm", "eagle"], [1], [args.depth]), questions, config
    )
    plain, eagle = runs
    print("\n" + report.table(runs))

    prompts = [question.encode(target, max_tokens=config.max_tokens) for question in questions]
    title("3 of 3: acceptance length of an untrained head, of this demo's and of the one that ships")
    taus = Taus(
        untrained=tau(target, untrained_like(demo, target), prompts, config, args.depth),
        demo=tau(target, demo, prompts, config, args.depth),
        shipped=eagle.acceptance_length,
    )
    prompt, sample = longest_answer(target, shipped, prompts[:16], config, args.depth)
    figures = {
        "plain_tokens_per_s": plain.tokens_per_second,
        "eagle_tokens_per_s": eagle.tokens_per_second,
        "speedup": eagle.ratio_to_mlx_lm,
        "acceptance_length": taus.shipped,
        "acceptance_by_position": eagle.acceptance_by_position,
        "identical": eagle.identical,
        "identical_count": eagle.identical_count,
        "excused": eagle.excused,
        "demo_acceptance_length": taus.demo,
        "untrained_acceptance_length": taus.untrained,
        "train_seconds": train_seconds,
        "total_seconds": time.perf_counter() - began,
        "depth": args.depth,
        "max_tokens": config.max_tokens,
        "prompts": eagle.prompts,
        "left_out_looping": eagle.left_out_looping,
        "machine": vars(describe()),
    }
    report.write_json(figures, folder / "report.json")
    draw(taus, runs, folder / "summary.png")
    show(taus, runs, train_seconds, sample, decode(target, prompt))


def longest_answer(
    target: em.Target, head: Eagle3Head, prompts: list[list[int]], config: BenchConfig, depth: int
) -> tuple[list[int], em.Output]:
    """Return a prompt and its continuation, the longest one that does not loop, as an example to show."""
    engine = em.Engine(target, em.HeadProposer(head), policy=em.FixedPolicy(depth))
    said = list(zip(prompts, engine.generate(prompts, config.params(len(prompts), config.max_tokens)), strict=True))
    fit = [pair for pair in said if not is_loop(pair[1].tokens, config.least_distinct)]
    return max(fit, key=lambda pair: len(pair[1].tokens), default=said[0])


def title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def decode(target: em.Target, tokens: list[int]) -> str:
    assert target.tokenizer is not None
    return str(target.tokenizer.decode(tokens))


def show(taus: Taus, runs: list[Run], train_seconds: float, sample: em.Output, prompt: str) -> None:
    """Print the end of the demo: a text and the table."""
    plain, eagle = runs
    total = eagle.prompts + eagle.left_out_looping
    title(f"a sample, {sample.acceptance_length:.2f} tokens per forward of the target")
    print(prompt + sample.text)
    title("what was gained")
    rows = [
        ("tau, untrained head", f"{taus.untrained:.2f}"),
        (f"tau, trained here for {train_seconds / 60:.1f} minutes", f"{taus.demo:.2f}"),
        ("tau, the head that ships", f"{taus.shipped:.2f}"),
        ("mlx-lm, plain", f"{plain.tokens_per_second:.1f} tokens/s"),
        ("with the head that ships", f"{eagle.tokens_per_second:.1f} tokens/s"),
        ("speedup", f"{eagle.ratio_to_mlx_lm or 0:.2f} x"),
        ("identical text", f"{'yes' if eagle.identical else 'NO'}, {eagle.identical_count} of {total} prompts"),
        ("excused as rounding", str(eagle.excused)),
    ]
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name.ljust(width)}  {value}" for name, value in rows))
    print(
        f"\ntau: tokens emitted per target forward, bonus token included, depth {eagle.depth}, greedy, over "
        f"{eagle.prompts} held-out prompts; {eagle.left_out_looping} more left out because their continuation loops."
    )


def draw(taus: Taus, runs: list[Run], path: Path) -> None:
    """Draw two bar charts: acceptance length of the three heads, and tokens per second."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    plain, eagle = runs
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained")
    bars = left.bar(["untrained", "this demo", "shipped"], [taus.untrained, taus.demo, taus.shipped], color="#56b4e9")
    left.bar_label(bars, fmt="%.2f", padding=2)
    left.set_title(f"acceptance length (depth {eagle.depth}, greedy)")
    left.set_ylabel("tokens per target forward")
    bars = right.bar(
        ["mlx-lm", "EAGLE-MLX"],
        [plain.tokens_per_second, eagle.tokens_per_second],
        color=["#999999", "#009e73"],
    )
    right.bar_label(bars, fmt="%.0f", padding=2)
    right.set_title(f"speed, the same text: x {eagle.ratio_to_mlx_lm or 0:.2f}")
    right.set_ylabel("tokens per second")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.12)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/demo"))
    parser.add_argument("--target", type=Path, default=CHECKPOINTS / "target")
    parser.add_argument("--head", type=Path, default=CHECKPOINTS / "head", help="the head that ships")
    parser.add_argument("--prompts", type=Path, default=CHECKPOINTS / "prompts.jsonl")
    parser.add_argument("--config", type=Path, default=CHECKPOINTS / "demo.yaml", help="recipe of the training")
    parser.add_argument("--minutes", type=float, help="of training, in place of the recipe's")
    parser.add_argument("--limit", type=int, default=100, help="held-out prompts (default 100)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4, help="draft tokens a round (default 4)")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    print(f"blas: {blas.activate()}")
    try:
        if args.output.exists() and any(args.output.iterdir()) and not (args.output / "report.json").is_file():
            raise OutputError(f"{args.output} exists and holds no demo; move it away or give another --output")
        for needed in (args.target / "config.json", args.head / "config.json", args.prompts):
            if not needed.is_file():
                raise EagleError(f"{needed} is missing; the demo runs from a complete checkout")
        with new_folder(args.output, overwrite=True) as folder:
            run(args, folder)
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind", file=sys.stderr)
        return 130
    print(f"\nwritten: {args.output}/report.json, {args.output}/summary.png and the head with its plots")
    return 0


if __name__ == "__main__":
    sys.exit(main())
