"""How a head rises that learns from requests: an engine answers prompts, and the learner works whenever it is idle.

    python benchmarks/learning.py --target checkpoints/target --head checkpoints/head --folder out/learned \\
        --requests 2000 --other checkpoints/prompts.jsonl

After every `--every` requests, τ is measured on prompts that are never served, and on the other prompts, without
answers that loop. Prompts describe functions of the standard library in words, or are those of `--traffic`; they are
repeated with new seeds until there are enough. `--first 1000` continues in a folder that has seen 1,000 requests.
`--head none` begins without a head.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import eagle_mlx as em
from eagle_mlx.data_pipelines.sources.stdlib import functions_of, iter_files
from eagle_mlx.heads.precision import quantize_for
from eagle_mlx.serve.learning.learner import Learner
from eagle_mlx.serve.learning.options import LearnOptions
from eagle_mlx.serve.prompts import Question, read_questions
from eagle_mlx.serve.speculation import Speculation
from eagle_mlx.text import is_loop

DEPTH = 4
FRESH = 60
"""Prompts for a measurement."""


def described() -> list[Question]:
    """Return requests in words for the documented functions of the standard library, shuffled."""
    functions = (function for file in iter_files("train") for function in functions_of(file))
    texts = sorted({function.docstring for function in functions if function.docstring})
    random.Random(0).shuffle(texts)
    wishes = [f"Write a function that {text[0].lower()}{text[1:]}" for text in texts]
    return [Question([{"role": "user", "content": wish}]) for wish in wishes]


def tau(engine: em.Engine, prompts: list[list[int]], tokens: int) -> float:
    outputs = engine.generate(prompts, em.SamplingParams(max_tokens=tokens, learn=False, memory=False))
    kept = [output for output in outputs if not is_loop(output.tokens)]
    return sum(len(output.tokens) for output in kept) / max(1, sum(output.rounds for output in kept))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--target", "--head"):
        parser.add_argument(name, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    for name in ("--traffic", "--other", "--json"):
        parser.add_argument(name, type=Path)
    for name, default in (("--first", 0), ("--requests", 2000), ("--every", 200), ("--tokens", 96)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--temperature", type=float, default=0.8)
    options = parser.parse_args(argv)
    target = em.load_target(options.target)
    head = em.load_head(options.head, target)
    quantize_for(head, target)
    serving = em.HeadProposer(head)
    learner = Learner(LearnOptions(folder=options.folder), target, serving, Speculation(head=options.head))
    engine = em.Engine(target, serving, policy=em.FixedPolicy(DEPTH), max_batch=16, collector=learner.collector)

    def encoded(questions: Sequence[Question]) -> list[list[int]]:
        return [question.encode(target, max_tokens=options.tokens) for question in questions]

    prompts = encoded(read_questions(options.traffic, 10**6) if options.traffic else described())
    held_out = min(FRESH, len(prompts) // 2)
    served, fresh = prompts[held_out:], prompts[:held_out]
    other = encoded(read_questions(options.other, FRESH)) if options.other else []
    rows: list[dict[str, Any]] = []
    for count in range(options.first, options.first + options.requests + 1, options.every):
        began = time.monotonic()
        if count > options.first:
            numbers = range(count - options.every, count)
            own = [em.SamplingParams(options.temperature, seed=number, max_tokens=options.tokens) for number in numbers]
            engine.generate([served[number % len(served)] for number in numbers], own)
        answered = time.monotonic()
        while learner.pending:
            learner.work()
        learned = time.monotonic()
        row = {"requests": count, "tau": tau(engine, fresh, options.tokens)}
        row |= {"other": tau(engine, other, options.tokens)} if other else {}
        row |= {"steps": learner.steps, "version": learner.versions.serving, "texts": len(learner.texts.all)}
        rows.append({**row, "answering": round(answered - began), "learning": round(learned - answered)})
        print(rows[-1], flush=True)
    learner.close()
    if options.json is not None:
        events = list(map(asdict, learner.versions.events))
        options.json.write_text(json.dumps({"rows": rows, "events": events}, indent=1))


if __name__ == "__main__":
    main()
