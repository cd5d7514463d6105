"""Replay greedy texts with draft windows of several sizes: τ and the time of a draft by context length.

    python benchmarks/draft_windows.py --target out/real/smollm2-135m-instruct \
      --head checkpoints/smollm2-135m-instruct --filler 512 2000 7000 --windows 512 1024

The target writes each answer once. The head then drafts chains along it, once for each window, as `eagle_mlx.judge`
does: greedy text does not depend on drafts. Answers that loop are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import median

import eagle_mlx as em
from eagle_mlx.judge import Drafting, draft_along, read_text
from eagle_mlx.machine import describe
from eagle_mlx.paired import tau
from eagle_mlx.serve.prompts import read_questions, with_filler
from eagle_mlx.text import is_loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or hub id of the model")
    parser.add_argument("--head", required=True, help="folder or hub id of its head")
    parser.add_argument("--prompts", type=Path, default=Path("checkpoints/questions.jsonl"), help="jsonl (%(default)s)")
    parser.add_argument("--filler", type=int, nargs="+", default=[512, 2000], help="tokens before each prompt")
    parser.add_argument("--windows", type=int, nargs="+", default=[512], help="windows to compare with none")
    parser.add_argument("--sinks", type=int, nargs="+", default=[4], help="sinks of these windows (%(default)s)")
    parser.add_argument("--limit", type=int, default=8, help="questions, spread evenly (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of an answer (%(default)s)")
    parser.add_argument("--depth", type=int, default=4, help="draft tokens per round (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the rounds of each answer")
    args = parser.parse_args()
    target = em.load_target(args.target)
    head = em.load_head(args.head, target, check=False)
    windows = {"off": (0, None), **{f"{n}+{s}": (n, s) for n in args.windows for s in args.sinks}}
    proposers = {name: em.HeadProposer(head, *window) for name, window in windows.items()}
    for proposer in proposers.values():
        proposer.bind(target)
    layers, engine = proposers["off"].aux_layers, em.Engine(target)
    params = em.SamplingParams(max_tokens=args.max_tokens)
    print(describe(), flush=True)
    results: dict[int, list[dict[str, Drafting]]] = {}
    for filler in args.filler:
        results[filler] = answers = []
        for question in with_filler(read_questions(args.prompts, args.limit), target, filler):
            prompt = question.encode(target, max_tokens=args.max_tokens)
            answer = engine.generate([prompt], params)[0].tokens
            if is_loop(answer) or len(answer) < 8:
                continue
            text = read_text(target, layers, [*prompt, *answer], len(prompt), params)
            answers.append({name: draft_along(own, text, args.depth, target) for name, own in proposers.items()})
            print(f"{filler:6,} tokens of text, {len(answers)} answers: {summary(answers)}", flush=True)
    if args.json:
        rows = {size: [{k: asdict(v) for k, v in row.items()} for row in answers] for size, answers in results.items()}
        args.json.write_text(json.dumps({"machine": asdict(describe()), "results": rows}, indent=1))


def summary(answers: Sequence[dict[str, Drafting]]) -> str:
    """Return τ and the median milliseconds of a draft by window."""
    parts = []
    for name in answers[0]:
        drafted = [answer[name] for answer in answers]
        milliseconds = 1e3 * median(chain.from_iterable(part.seconds for part in drafted))
        parts.append(f"{name} τ {tau([part.decoded for part in drafted]):.2f}, draft {milliseconds:.0f} ms")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
