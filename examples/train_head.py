"""Train a draft head from Python and decode with it.

Settings have the names of eagle-train's flags (docs/flags.md). The data is Python's standard library; more steps make
a better head: `make demo` takes 550. Needs the extra `train`. Run it in the folder of the repository:

    python examples/train_head.py --steps 100 --output out/example-head
"""

import argparse

import eagle_mlx as em
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.job import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="checkpoints/target")
    parser.add_argument("--output", default="out/example-head")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--limit", type=int, default=400, help="number of training texts")
    args = parser.parse_args()

    data = {"data": ["builtin:python"], "limit": args.limit, "max_length": 256}
    head = {"head": "eagle3", "draft_vocab": 2048}
    steps = {"max_steps": args.steps, "rows": 2, "length": 256, "unroll": 2, "lr": 2e-3}
    measuring = {"eval_data": "checkpoints/prompts.jsonl", "eval_prompts": 4, "eval_tokens": 32}
    report = run(TrainConfig.of(target=args.target, output=args.output, **data, **head, **steps, **measuring))
    assert report is not None
    before, after = report["untrained_acceptance_length"], report["acceptance_length"]
    print(f"tokens per forward: {before:.2f} untrained, {after:.2f} after {report['steps']} steps")

    target = em.load_target(args.target)
    engine = em.Engine(target, em.load_head(f"{args.output}/best", target), policy=em.FixedPolicy(2))
    output = engine.generate("def add(a, b):\n", em.SamplingParams(max_tokens=32))
    print(f"{output.text}\n[{output.accepted} of {output.drafted} drafts accepted]")


if __name__ == "__main__":
    main()
