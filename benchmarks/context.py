"""Measure τ by context length: the same questions after more and more text.

    python benchmarks/context.py --target out/real/smollm2-135m-instruct \
      --head checkpoints/smollm2-135m-instruct --prompts question.jsonl --filler 0 512 2000 6000

Each prompt is read once, and decoded once with chains of a fixed depth. This does not check that the text is the
target's own. `eagle-bench --filler` does; it also compares speeds, and reads each prompt several times for that. Only a
question's first turn is asked. Continuations that loop are left out and counted. The last lines compare the questions
that loop at no length.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import eagle_mlx as em
from eagle_mlx.serve.prompts import Question, read_questions, with_filler
from eagle_mlx.target import Target
from eagle_mlx.text import is_loop


def main() -> None:
    args = _arguments()
    target = em.load_target(args.target)
    head = em.load_head(args.head, target)
    questions = read_questions(args.prompts, args.limit)
    by_filler = {}
    for tokens in args.filler:
        prompts = with_filler(questions, target, tokens) if tokens else questions
        by_filler[tokens] = decode(target, head, prompts, args)
        print(line(tokens, by_filler[tokens]), flush=True)
    kept = [
        index for index in range(len(questions)) if not any(outputs[index]["loops"] for outputs in by_filler.values())
    ]
    print(f"\nthe {len(kept)} of {len(questions)} questions that loop at no length:")
    for tokens, outputs in by_filler.items():
        print(line(tokens, [outputs[index] for index in kept]))
    if args.json:
        args.json.write_text(json.dumps({"questions": len(questions), "kept": kept, "by_filler": by_filler}, indent=1))


def decode(target: Target, head: Any, questions: Sequence[Question], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return for each question: prompt tokens, generated tokens, rounds, and whether the continuation loops."""
    engine = em.Engine(target, em.HeadProposer(head), policy=em.FixedPolicy(args.depth), max_batch=args.batch)
    prompts = [question.encode(target, max_tokens=args.max_tokens) for question in questions]
    outputs = engine.generate(prompts, em.SamplingParams(max_tokens=args.max_tokens), progress=True)
    return [
        {
            "context": len(prompt),
            "tokens": len(output.tokens),
            "rounds": output.rounds,
            "loops": is_loop(output.tokens),
        }
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def line(filler: int, outputs: Sequence[dict[str, Any]]) -> str:
    told = [output for output in outputs if not output["loops"]]
    tokens, rounds = sum(output["tokens"] for output in told), sum(output["rounds"] for output in told)
    mean = sum(output["context"] for output in outputs) / max(1, len(outputs))
    return (
        f"{filler:6,} tokens of text, {mean:6,.0f} of prompt on average: τ {tokens / max(1, rounds):.3f} over "
        f"{len(told)} continuations of {tokens:,} tokens, {len(outputs) - len(told)} left out as loops"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or hub id of the model")
    parser.add_argument("--head", required=True, help="folder or hub id of its head")
    parser.add_argument("--prompts", type=Path, required=True, help="jsonl, as for eagle-bench")
    parser.add_argument("--filler", type=int, nargs="+", default=[0, 512, 2000, 6000], help="tokens before each prompt")
    parser.add_argument("--limit", type=int, default=26, help="questions, spread evenly over categories (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="new tokens per question (%(default)s)")
    parser.add_argument("--depth", type=int, default=4, help="draft tokens per round (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="rows at a time; τ does not depend on it (%(default)s)")
    parser.add_argument("--json", type=Path, help="write all counts")
    return parser.parse_args()


if __name__ == "__main__":
    main()
