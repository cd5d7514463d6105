"""How a head rises that learns from requests: an engine answers prompts, and the learner works whenever it is idle.

    python benchmarks/learning.py --target checkpoints/target --head checkpoints/head --folder out/learned \\
        --traffic mine.jsonl --requests 2000 --other checkpoints/prompts.jsonl

After every `--every` requests, τ is measured on the last tenth of the traffic's prompts, which is never served, and on
the other prompts. The traffic is repeated with new seeds until there are enough requests.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import eagle_mlx as em
from eagle_mlx.heads.precision import quantize_for
from eagle_mlx.serve.learning.learner import Learner
from eagle_mlx.serve.learning.options import LearnOptions
from eagle_mlx.serve.prompts import read_questions
from eagle_mlx.serve.speculation import Speculation

DEPTH = 4


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--target", "--head"):
        parser.add_argument(name, required=True)
    for name in ("--folder", "--traffic"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    target = em.load_target(options.target)
    head = em.load_head(options.head, target)
    quantize_for(head, target)
    serving = em.HeadProposer(head)
    learner = Learner(LearnOptions(folder=options.folder), target, serving, Speculation(head=options.head))
    engine = em.Engine(target, serving, policy=em.FixedPolicy(DEPTH), collector=learner.collector)

    def encoded(path: Path) -> list[list[int]]:
        return [question.encode(target, max_tokens=options.tokens) for question in read_questions(path, 10**6)]

    def tau(prompts: list[list[int]]) -> float:
        params = em.SamplingParams(max_tokens=options.tokens, learn=False)
        outputs = engine.generate(prompts, params)
        return sum(len(output.tokens) for output in outputs) / max(1, sum(output.rounds for output in outputs))

    prompts = encoded(options.traffic)
    served, fresh = prompts[: -max(1, len(prompts) // 10)], prompts[-max(1, len(prompts) // 10) :]
    other = encoded(options.other)[:40] if options.other is not None else []
    rows: list[dict[str, Any]] = []
    for count in range(0, options.requests + 1, options.every):
        if count:
            numbers = range(count - options.every, count)
            own = [em.SamplingParams(options.temperature, seed=number, max_tokens=options.tokens) for number in numbers]
            engine.generate([served[number % len(served)] for number in numbers], own)
        began = time.monotonic()
        while learner.pending:
            learner.work()
        row = {"requests": count, "tau": tau(fresh), "steps": learner.steps, "version": learner.versions.serving}
        row |= {"other": tau(other)} if other else {}
        rows.append({**row, "seconds": round(time.monotonic() - began, 1)})
        print(rows[-1], flush=True)
    learner.close()
    if options.json is not None:
        options.json.write_text(
            json.dumps({"rows": rows, "events": list(map(asdict, learner.versions.events))}, indent=1)
        )


if __name__ == "__main__":
    main()
