"""eagle-bench: measure how much faster the same text is generated."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from eagle_mlx.command import arguments, exit_code, read
from eagle_mlx.late import late

from .options import BenchOptions

EPILOG = """\
examples:
  eagle-bench                                   the embedded target and head on the embedded prompts
  eagle-bench --depth 1 2 4 6 --modes mlx-lm eagle
  eagle-bench --target mlx-community/Qwen3-4B-4bit --head out/head --prompts mine.jsonl --json figures.json
  eagle-bench --batch 1 4 8 --temperature 0 0.7
  eagle-bench --target Qwen3-4B-4bit --prompts spec_bench.jsonl --limit 80      τ and tokens/s by category
  eagle-bench --head random --modes plain eagle --policy throughput     the cost of a useless head

All modes decode the same prompts in turns. Figures are medians over the repeats. mlx-lm and mlx-lm-draft decode one
prompt at a time; mlx-lm-batch is measured for each batch above 1. Texts are compared with mlx-lm's greedy text or,
above temperature 0 and with --exact, with the plain engine's text for the same seeds.

All modes share one model, as EAGLE-MLX loads it. With --policy throughput, hybrid is what eagle-generate and
eagle-serve do by default: the head and n-grams, whichever is faster; but earlier texts, which they remember, do not
draft. With --policy fixed, n-grams draft whenever they match."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run eagle-bench. Return the exit status: 0, 1 if a text differs, 2 for an error, 130 if interrupted."""
    given = arguments(argv)
    about = "Compare tokens/s, acceptance and texts of speculative decoding with plain decoding."
    command = shlex.join(["eagle-bench", *given])
    return exit_code(
        lambda: late(f"{__package__}.run:bench")(read(BenchOptions, given, "eagle-bench", about, EPILOG), command)
    )
