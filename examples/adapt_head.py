"""Adapt a head to your own prompts: the target answers them, and the head learns from the answers.

The judge compares both heads on held-out prompts; without a better one, the output holds the head as it was. Older
conversations, here Python's standard library, are learned too, so that they are not forgotten. Needs the extra
`train`. Run it in the folder of the repository:

    python examples/adapt_head.py --prompts checkpoints/prompts.jsonl --steps 200 --output out/adapted-head
"""

import argparse

from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.job import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="checkpoints/target")
    parser.add_argument("--head", default="checkpoints/head")
    parser.add_argument("--prompts", default="checkpoints/prompts.jsonl", help="rows with `messages`")
    parser.add_argument("--replay", default="builtin:python-chat", help="older conversations")
    parser.add_argument("--output", default="out/adapted-head")
    parser.add_argument("--limit", type=int, default=60, help="number of prompts, of which at least 6 must judge")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    models = {"target": args.target, "adapt": args.head, "output": args.output}
    data = {"prompts": [args.prompts], "replay": [args.replay], "limit": args.limit}
    steps = {"max_steps": args.steps, "rows": 2, "length": 256, "max_length": 256, "unroll": 4}
    report = run(TrainConfig.of(**models, **data, **steps, eval_tokens=32))
    assert report is not None
    before, after = report["adapted"]["own"]["acceptance_lengths"]
    verdict = report["adapted"]["verdict"]
    print(f"tokens per forward: {before:.2f} before, {after:.2f} after {report['steps']} steps: {verdict}")


if __name__ == "__main__":
    main()
