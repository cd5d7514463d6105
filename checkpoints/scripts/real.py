"""Fetch a real model, let it answer questions in all decoding modes, and show the gain of each mode.

In the mode `again`, everything drafts that eagle-serve has, and the same questions were answered before.

    python checkpoints/scripts/real.py --output out/real

The model is SmolLM2-135M-Instruct. On the first run, make_real_model.py fetches, checks and converts it. Writes
report.json and summary.png to the output folder. If there is no head, modes with a head and their figures are left out.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from io import BytesIO
from pathlib import Path

import make_real_model
import matplotlib

import eagle_mlx as em
from eagle_mlx import blas, hub
from eagle_mlx.errors import EagleError, OutputError
from eagle_mlx.files import check_file, write_whole
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.machine import describe
from eagle_mlx.policy.throughput import MOST_TOKENS, levels_for
from eagle_mlx.proposers.ngram import MIN_NGRAM
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.serve.bench import report
from eagle_mlx.serve.bench.measure import measure, tolerance_for
from eagle_mlx.serve.bench.modes import BenchModels, EngineMode, Mode, build_modes
from eagle_mlx.serve.bench.options import BenchConfig
from eagle_mlx.serve.bench.report import BenchRun
from eagle_mlx.serve.prompts import Question, read_questions
from eagle_mlx.serve.speculation import MemoryOptions, Speculation

CHECKPOINTS = Path(__file__).resolve().parents[1]
HEAD = CHECKPOINTS / make_real_model.NAME
"""The included head for the model."""
OWN_QUESTIONS = CHECKPOINTS / "questions.jsonl"
BESIDE = CHECKPOINTS.parents[1] / "shared" / "data" / "spec_bench.jsonl"
"""Spec-Bench in a folder next to the checkout, if it is there."""
NO_HEAD = "none"
TAU_DEPTH = 4
"""The chain length for the reported acceptance length, as in this project's other figures."""
CHAINS = (2, TAU_DEPTH)
"""Fixed chain lengths: for heads that predict few tokens correctly, and for those that predict many."""
TREES = (8, 16)
"""Draft tokens of trees, for the same reason. On a CPU larger trees cost more than they gain (docs/measurements.md)."""
LIMIT = 13
"""One question of each of Spec-Bench's categories: 21 turns with 3,600 prompt tokens."""
MAX_TOKENS = 40
"""Tokens per answer. With this limit, eight modes take less than 20 minutes on two cores.

Plain decoding in float32 has 16.7 tokens/s: 8 minutes. Each prompt is read twice, once to time the first token.
"""
AGAIN = "again"
"""The mode with a memory of earlier texts, when the same questions are asked a second time."""
_COLOURS = {"ngram": "#e69f00", "eagle": "#009e73", "hybrid": "#0072b2", AGAIN: "#56b4e9"}
TURN = 8
"""Tokens after which modes change over, as in this project's other figures: a machine's speed varies."""


def head_of(given: str | None) -> Path | None:
    """Return the folder of the head, or print why there is none and return None.

    Raises EagleError if the named folder does not exist.
    """
    if given == NO_HEAD or (given is None and not _is_head(HEAD)):
        why = "--head none was given" if given == NO_HEAD else f"none ships in {HEAD}"
        print(f"no head: its modes are left out, since {why}")
        return None
    folder = HEAD if given is None else Path(given)
    if not _is_head(folder):
        raise EagleError(f"{folder} holds no head, since config.json is missing; give its folder, or --head {NO_HEAD}")
    return folder


def _is_head(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def questions_of(given: Path | None) -> Path:
    """Return the file of questions: the named one, else Spec-Bench if available, else this project's own."""
    if given is not None:
        return given
    if named := os.environ.get("SPEC_BENCH"):
        return Path(named)
    return BESIDE if BESIDE.is_file() else OWN_QUESTIONS


def modes_of(target: em.Target, head: DraftHead | None) -> list[Mode]:
    """Return the modes: mlx-lm, plain, n-grams, and with a head also the head's modes.

    These are the head with and without n-grams under the policy `throughput`, and the head in fixed chains and trees.
    As in eagle-serve, the policy begins with the target's cost curve.
    """
    models = BenchModels(target, head, prior=True)
    modes = build_modes(models, ["mlx-lm", "plain"], [1], [])
    modes += build_modes(models, ["ngram"], [1], [MOST_TOKENS], ["throughput"])
    if head is not None:
        modes += build_modes(models, ["eagle", "hybrid"], [1], [MOST_TOKENS], ["throughput"])
        modes += build_modes(models, ["eagle"], [1], CHAINS)
        for nodes in TREES:
            modes += build_modes(models, ["eagle"], [1], [levels_for(nodes)], nodes=[nodes])
    return modes


def remembering(
    target: em.Target, head: DraftHead | None, questions: Sequence[Question], max_tokens: int
) -> EngineMode:
    """Return a mode with the head, if there is one, and n-grams over all texts, after its answers to the questions."""
    [mode] = build_modes(BenchModels(target), ["ngram"], [1], [MOST_TOKENS], ["throughput"])
    assert isinstance(mode, EngineMode)
    ngrams = em.NgramProposer(min_ngram=1 if head is None else MIN_NGRAM, memory=em.Memory())
    proposer = ngrams if head is None else em.HybridProposer(em.HeadProposer(head), ngrams)
    settings = Speculation(num_tokens=MOST_TOKENS)
    mode.engine = settings.engine(target, proposer, MemoryOptions(), max_batch=1, clock=mode.clock)
    mode.weights += proposer.nbytes
    for question in questions:
        answers = list[str]()
        while len(answers) <= len(question.later):
            prompt = question.encode(target, answers)
            answers.append(mode.engine.generate(prompt, SamplingParams(max_tokens=max_tokens)).text)
    return mode


def figures(runs: Sequence[BenchRun]) -> dict[str, object]:
    """Return the main figures. Speedups are ratios of tokens/s to mlx-lm's. The first is for a head with n-grams, which
    eagle-serve uses if there is a head.

    A head's figures need a head. τ covers only categories with an answer that does not loop.
    """
    of_all: dict[str, object] = {
        "identical": all(run.identical for run in runs),
        "excused": sum(run.excused or 0 for run in runs),
        "left_out_looping": runs[0].left_out_looping,
        "speedup_ngram": max(_speedups(runs, "ngram")),
    }
    eagle = [run for run in runs if run.mode == "eagle"]
    if not eagle:
        return of_all
    fixed = [run for run in eagle if run.policy == "fixed"]
    chain = chain_of(runs)
    assert chain is not None
    by_category = {part.name: part.acceptance_length for part in chain.by_category if part.acceptance_length}
    return {
        **of_all,
        "tau": {"overall": chain.acceptance_length, **by_category},
        "speedup": max(_speedups(runs, "hybrid")),
        "speedup_head": max(_speedups([run for run in eagle if run.policy == "throughput"], "eagle")),
        "speedup_chain": max(_speedups([run for run in fixed if not run.nodes], "eagle")),
        "speedup_tree": max(_speedups([run for run in fixed if run.nodes], "eagle")),
    }


def _speedups(runs: Sequence[BenchRun], mode: str) -> list[float]:
    return [run.ratio_to_mlx_lm for run in runs if run.mode == mode and run.ratio_to_mlx_lm is not None]


def chain_of(runs: Sequence[BenchRun]) -> BenchRun | None:
    """Return the head's run with a chain of four, which gives the reported τ; None without a head."""
    wanted = ("eagle", "fixed", TAU_DEPTH, 0)
    return next((run for run in runs if (run.mode, run.policy, run.depth, run.nodes) == wanted), None)


def run(args: argparse.Namespace) -> bool:
    """Measure, write and show. Return whether all modes gave mlx-lm's text. Raises EagleError."""
    began = time.perf_counter()
    source, head_folder = questions_of(args.prompts), head_of(args.head)
    questions = read_questions(source, args.limit)

    title(f"1 of 3: the model, {make_real_model.NAME}")
    folder = args.target or make_real_model.make(args.output)[0]
    print(folder)
    target = em.load_target(folder)
    head = None
    if head_folder is not None:  # the included head is known to fit
        head = em.load_head(head_folder, target, check=head_folder != HEAD)
    config = BenchConfig(max_tokens=args.max_tokens, repeats=1, turn=TURN)
    modes = [*modes_of(target, head), remembering(target, head, questions, config.max_tokens)]
    report_file, picture = prepare(args.output)

    title(f"2 of 3: {len(questions)} questions of {source}, decoded in every way")
    *runs, again = measure(target, modes, questions, config)
    runs.append(replace(again, mode=AGAIN))
    main, tolerance = figures(runs), tolerance_for(target)
    about_head = {"head": str(head_folder), "head_sha256": hub.weights_digest(head_folder)} if head_folder else {}
    content = {
        **main,
        "speedup_again": again.ratio_to_mlx_lm,
        "target": target.name,
        **about_head,
        "prompts": str(source),
        "questions": len(questions),
        "max_tokens": config.max_tokens,
        "turn": config.turn,
        "tolerance": tolerance,
        "total_seconds": time.perf_counter() - began,
        "machine": vars(describe()),
        "runs": list(map(asdict, runs)),
    }
    draw(runs, picture)
    report.write_json(content, report_file)

    title("3 of 3: what is gained")
    print(report.table(runs) + "\n")
    chain = chain_of(runs)
    print((report.by_category([chain]) if chain else "") + report.footnote(runs, config.max_tokens, tolerance))
    print(f"\nwritten: {report_file}, {picture}")
    return bool(main["identical"])


def prepare(folder: Path) -> tuple[Path, Path]:
    """Return the paths of report and picture. Creates the folder and checks that it is writable before measuring."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise OutputError(f"{folder} cannot be made ({e.strerror}); give another --output") from e
    places = folder / "report.json", folder / "summary.png"
    for path in places:
        check_file(path)
    return places


def title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def name_of(run: BenchRun) -> str:
    """Return a mode's name in the picture."""
    if run.mode == "eagle" and run.policy == "fixed":
        return f"tree of {run.nodes}" if run.nodes else f"chain of {run.depth}"
    return {"ngram": "n-grams", "eagle": "head", "hybrid": "head, n-grams"}.get(run.mode, run.mode)


def draw(runs: Sequence[BenchRun], path: Path) -> None:
    """Draw bars of tokens per second and, if a head drafted, τ by category. Raises OutputError."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    chain = chain_of(runs)
    figure, axes = pyplot.subplots(1, 2 if chain else 1, figsize=(13 if chain else 6, 4.5), layout="constrained")
    left, *right = list(axes) if chain else [axes]
    names, speeds = [name_of(run) for run in runs], [run.tokens_per_second for run in runs]
    colours = [_COLOURS.get(run.mode, "#999999") for run in runs]
    bars = left.bar(names, speeds, color=colours)
    left.bar_label(bars, [f"{run.tokens_per_second:.1f}\nx {run.ratio_to_mlx_lm or 1:.2f}" for run in runs], padding=2)
    left.set_title("speed, the same text; x: of mlx-lm")
    left.set_ylabel("tokens per second")
    left.tick_params(axis="x", rotation=30)
    if chain is not None:
        kept = [part for part in chain.by_category if part.acceptance_length]
        taus = [part.acceptance_length for part in kept] + [chain.acceptance_length]
        bars = right[0].barh([*(part.name for part in kept), "overall"], taus, color="#56b4e9")
        right[0].bar_label(bars, fmt="%.2f", padding=2)
        right[0].invert_yaxis()
        right[0].set_title(f"acceptance length (chain of {chain.depth}, greedy)")
        right[0].set_xlabel("tokens per target forward")
    for panel in (left, *right):
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(0.12)
    picture = BytesIO()
    figure.savefig(picture, dpi=150, format="png")
    pyplot.close(figure)
    try:
        write_whole(path, picture.getvalue())
    except OSError as e:
        raise OutputError(f"{path} cannot be written ({e.strerror}); give another --output") from e


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/real"), help="default out/real")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="questions in Spec-Bench's format (default: the file that SPEC_BENCH in the environment names, else "
        "questions of this project's own)",
    )
    parser.add_argument("--limit", type=int, default=LIMIT, help=f"questions, evenly of all categories ({LIMIT})")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help=f"of each answer (default {MAX_TOKENS})")
    parser.add_argument("--target", type=Path, help="folder of a model to take in place of the package's")
    parser.add_argument("--head", help="folder of a head for it, or none (default: the one that ships, where it does)")
    args = parser.parse_args()
    for flag, value in (("--limit", args.limit), ("--max-tokens", args.max_tokens)):
        if value < 1:
            parser.error(f"{flag} must be at least 1, got {value}")
    return args


def main() -> int:
    """Return 0, 1 if a text differs from mlx-lm's, 2 for an error, or 130 if interrupted."""
    args = parse_arguments()
    print(f"blas: {blas.activate()}")
    try:
        same = run(args)
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; an earlier report stands as it was", file=sys.stderr)
        return 130
    if not same:
        print("error: a mode's text differs from mlx-lm's by more than rounding; see the table", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
