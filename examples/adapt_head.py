"""Adapt a head to your own prompts: the target answers them, and the head learns from the answers.

A head that has seen your kind of text drafts it better. Answers of the target itself are the best data, because the
head learns to predict the target. Needs the extra `train`. Run it in the folder of the repository:

    python examples/adapt_head.py --prompts checkpoints/prompts.jsonl --steps 20 --output out/adapted-head
"""

import argparse
import json
from pathlib import Path

import eagle_mlx as em
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.job import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="checkpoints/target")
    parser.add_argument("--head", default="checkpoints/head")
    parser.add_argument("--prompts", type=Path, default=Path("checkpoints/prompts.jsonl"), help="rows with `messages`")
    parser.add_argument("--output", type=Path, default=Path("out/adapted-head"))
    parser.add_argument("--limit", type=int, default=40, help="number of prompts")
    parser.add_argument("--max-tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    target = em.load_target(args.target)
    engine = em.Engine(target, em.load_head(args.head, target))
    prompts = [json.loads(line)["messages"] for line in args.prompts.read_text().splitlines()[: args.limit]]
    outputs = engine.generate(prompts, em.SamplingParams(max_tokens=args.max_tokens), progress=True)
    answers = [{"role": "assistant", "content": output.text} for output in outputs]
    rows = [{"messages": [*prompt, answer]} for prompt, answer in zip(prompts, answers, strict=True)]
    data = args.output.with_suffix(".jsonl")
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    models = {"target": args.target, "init_from": args.head, "data": [str(data)], "output": str(args.output)}
    steps = {"max_steps": args.steps, "rows": 2, "length": 256, "max_length": 256, "lr": 1e-4}
    report = run(TrainConfig.of(**models, **steps, eval_prompts=4, eval_tokens=32))
    assert report is not None
    before, after = report["untrained_acceptance_length"], report["acceptance_length"]
    print(f"tokens per forward: {before:.2f} before, {after:.2f} after {report['steps']} steps on {data}")


if __name__ == "__main__":
    main()
