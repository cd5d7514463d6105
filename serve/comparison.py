"""`eagle-heads compare`: loads two heads, has the judge compare them, and prints the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle_mlx import HeadProposer, SamplingParams, __version__, hub, learn_costs
from eagle_mlx.catalog import embedded
from eagle_mlx.files import check_file
from eagle_mlx.judge import Comparison, Figures, Judge
from eagle_mlx.machine import describe
from eagle_mlx.progress import counted
from eagle_mlx.target import Target, fingerprint

from .bench.report import write_json
from .head_choice import load_head
from .head_options import Answers, Compare
from .prompts import Question, read_questions


def compare(options: Compare) -> int:
    """Print a comparison of two heads; return the exit status 0. Raises EagleError if they cannot be compared."""
    if options.json is not None:
        check_file(options.json)
    answers, names = options.answers, (options.first, options.second)
    target, _, prompts = load_prompts(options.target, answers)
    first, second = (HeadProposer(load_head(name, target, answers.head_bits)) for name in names)
    answers.loading.wire_active()
    judge = Judge(target, first, second, answers.depth)
    params = SamplingParams(options.temperature, max_tokens=answers.max_tokens)
    comparison = judge.compare(prompts, params, learn_costs(target), not answers.quiet)
    print(table(comparison))
    if options.json is not None:
        about: dict[str, Any] = {
            "target": target.name,
            "fingerprint": fingerprint(target),
            "heads": [{"name": name, "sha256": hub.weights_digest(hub.head_folder(name))} for name in names],
            "prompts": list(map(str, files_of(answers))),
            "machine": asdict(describe()),
            "eagle_mlx": __version__,
            "max_tokens": answers.max_tokens,
            "temperature": options.temperature,
            "verdict": comparison.gain.verdict,
        }
        write_json({**about, **asdict(comparison)}, options.json)
    return 0


def files_of(answers: Answers) -> Sequence[Path]:
    """Return the files of prompts: the user's, or the included one."""
    return answers.prompts or (embedded("prompts.jsonl"),)


def load_prompts(name: str, answers: Answers) -> tuple[Target, list[Question], list[list[int]]]:
    """Return the target, the questions and their tokens. Raises EagleError if one is not available or does not fit."""
    questions = [question for file in files_of(answers) for question in read_questions(file, answers.limit)]
    answers.loading.follow(name)
    target = answers.loading.load(name)
    return target, questions, [question.encode(target, max_tokens=answers.max_tokens) for question in questions]


def table(comparison: Comparison) -> str:
    """Return the figures of both heads, the gains with their intervals, and what they mean, as aligned text."""
    lines = [f"{'head':<6}{'tau':>7}  {'ms/draft':>8}  {'tokens/s':>8}  accepted by position"]
    lines += [_line(name, figures) for name, figures in (("A", comparison.first), ("B", comparison.second))]
    gain, by_name = comparison.gain, {"tokens per forward": comparison.acceptance, "tokens/s": comparison.speed}
    lines += ["", *(f"B against A, {name}: {part}" for name, part in by_name.items() if part is not None)]
    answers = f"{counted(gain.conversations, 'answer')}, {counted(comparison.tokens, 'token')}"
    left_out = f", {comparison.left_out} left out as loops" if comparison.left_out else ""
    link = "from" if gain.verdict == "not told apart" else "than"
    lines += ["", f"B is {gain.verdict} {link} A: {answers}{left_out}"]
    if gain.verdict == "not told apart":
        lines.append(gain.advice)
    return "\n".join(lines)


def _line(name: str, figures: Figures) -> str:
    speed = "-" if figures.tokens_per_second is None else f"{figures.tokens_per_second:.1f}"
    shares = " ".join(f"{share:.2f}" for share in figures.acceptance_by_position)
    cells = f"{figures.acceptance_length:>7.3f}  {1000 * figures.draft_seconds:>8.1f}  {speed:>8}"
    return f"{name:<6}{cells}  {shares}"
