"""Train a head for a few minutes, decode with it and with the included head, and show the gain.

    python checkpoints/scripts/demo.py --output out/demo

Writes the head with its training plots, report.json and summary.png. Replaces an earlier demo at the same place once
the new one is complete.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib

import eagle_mlx as em
from eagle_mlx import blas
from eagle_mlx.command import Stop
from eagle_mlx.cpu import tune_process
from eagle_mlx.errors import EagleError, OutputError
from eagle_mlx.files import is_empty, new_folder
from eagle_mlx.machine import describe
from eagle_mlx.serve.bench import report
from eagle_mlx.serve.bench.measure import measure
from eagle_mlx.serve.bench.modes import BenchModels, build_modes
from eagle_mlx.serve.bench.options import BenchConfig
from eagle_mlx.serve.bench.report import BenchRun
from eagle_mlx.serve.prompts import Question, read_questions
from eagle_mlx.text import is_loop
from eagle_mlx.train.config import load_config
from eagle_mlx.train.data import training_data
from eagle_mlx.train.kinds import resolve
from eagle_mlx.train.run import data_fingerprint, set_up, train

CHECKPOINTS = Path(__file__).resolve().parents[1]


class Unsaved(Stop):
    """Lets Ctrl-C end the training at once: the folder is temporary, so nothing could be resumed there."""

    def listening(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def train_head(args: argparse.Namespace, target: em.Target, prompts: list[list[int]], output: Path) -> dict[str, Any]:
    """Train a head by the recipe, measured on the demo's prompts; return the run's report. Raises EagleError."""
    own = {"target": str(args.target), "output": str(output), "eval_depth": args.depth, "eval_tokens": args.max_tokens}
    config = resolve(load_config(args.config, {**own, "minutes": args.minutes}), target.hidden_size)
    data = training_data(target, config, progress=True)
    with set_up(target, config, data_fingerprint(data), stop=Unsaved()) as setup:
        return train(setup, data, prompts)


def run(args: argparse.Namespace, folder: Path) -> None:
    began = time.perf_counter()
    target = em.load_target(args.target)
    shipped = em.load_head(args.head, target)
    config = BenchConfig(max_tokens=args.max_tokens, repeats=1)
    questions = read_questions(args.prompts, args.limit)
    prompts = [question.encode(target, max_tokens=config.max_tokens) for question in questions]
    title("1 of 2: train an EAGLE-3 head from scratch, and measure it on held-out prompts")
    trained = train_head(args, target, prompts, folder / "head")
    train_seconds = time.perf_counter() - began

    title("2 of 2: decode the same prompts, plainly and with the head that ships")
    models, modes = BenchModels(target, shipped), ["mlx-lm", "eagle"]
    plain, eagle = runs = measure(target, build_modes(models, modes, [1], [args.depth]), questions, config)
    print("\n" + report.table(runs))
    taus = {
        "untrained": trained["untrained_acceptance_length"],
        "this demo": trained["acceptance_length"],
        "shipped": eagle.acceptance_length,
    }
    question, sample = longest_answer(target, shipped, questions[:16], config, args.depth)
    figures = {
        "plain_tokens_per_s": plain.tokens_per_second,
        "eagle_tokens_per_s": eagle.tokens_per_second,
        "speedup": eagle.ratio_to_mlx_lm,
        "acceptance_length": eagle.acceptance_length,
        "acceptance_by_position": eagle.acceptance_by_position,
        "identical": eagle.identical,
        "identical_count": eagle.identical_count,
        "excused": eagle.excused,
        "demo_acceptance_length": taus["this demo"],
        "untrained_acceptance_length": taus["untrained"],
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
    show(taus, runs, train_seconds, question, sample)


def longest_answer(
    target: em.Target, head: Any, questions: list[Question], config: BenchConfig, depth: int
) -> tuple[str, em.Output]:
    """Return a question and its continuation, the longest one that does not loop, as an example to show."""
    engine = em.Engine(target, em.HeadProposer(head), policy=em.FixedPolicy(depth))
    prompts = [question.encode(target) for question in questions]
    outputs = engine.generate(prompts, config.params(len(prompts), config.max_tokens))
    pairs = list(zip(questions, outputs, strict=True))
    fit = [pair for pair in pairs if not is_loop(pair[1].tokens, config.least_distinct)]
    question, output = max(fit, key=lambda pair: len(pair[1].tokens), default=pairs[0])
    return "\n\n".join(str(message["content"]) for message in question.content), output


def title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def show(taus: dict[str, float], runs: list[BenchRun], train_seconds: float, question: str, sample: em.Output) -> None:
    """Print the end of the demo: a text and the table."""
    plain, eagle = runs
    total = eagle.prompts + eagle.left_out_looping
    title(f"a sample with the head that ships, {sample.acceptance_length:.2f} tokens per forward of the target")
    print(f"{question}\n\n{sample.text}")
    title("what was gained")
    rows = [
        ("tau, untrained head (its linear start)", f"{taus['untrained']:.2f}"),
        (f"tau, trained here for {train_seconds / 60:.1f} minutes", f"{taus['this demo']:.2f}"),
        ("tau, the head that ships", f"{taus['shipped']:.2f}"),
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


def draw(taus: dict[str, float], runs: list[BenchRun], path: Path) -> None:
    """Draw two bar charts: acceptance length of the three heads, and tokens per second."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    plain, eagle = runs
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained")
    bars = left.bar(list(taus), list(taus.values()), color="#56b4e9")
    left.bar_label(bars, fmt="%.2f", padding=2)
    left.set_title(f"acceptance length (depth {eagle.depth}, greedy)")
    left.set_ylabel("tokens per target forward")
    bars = right.bar(
        ["mlx-lm", "EAGLE-MLX, shipped head"],
        [plain.tokens_per_second, eagle.tokens_per_second],
        color=["#999999", "#009e73"],
    )
    right.bar_label(bars, fmt="%.0f", padding=2)
    right.set_title(f"speed with the shipped head: x {eagle.ratio_to_mlx_lm or 0:.2f}")
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
    parser.add_argument("--minutes", type=float, default=2, help="of training, if the recipe's steps take longer")
    parser.add_argument("--limit", type=int, default=40, help="held-out prompts (default 40)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4, help="draft tokens a round (default 4)")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    print(f"blas: {blas.activate()}")
    tune_process()
    try:
        if args.output.exists() and not is_empty(args.output) and not (args.output / "report.json").is_file():
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
