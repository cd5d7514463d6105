"""Generate texts for several prompts at once, each with its own sampling parameters.

The prompts share the forwards of the target, and the head drafts for all of them. A seeded text is the same in any
batch, with or without drafts. Run it in the folder of the repository:

    python examples/batch.py --max-tokens 64
"""

import argparse
from dataclasses import replace

import eagle_mlx as em

PROMPTS = {
    'def median(values):\n    """Return the median."""': em.SamplingParams(),  # greedy
    'def read_lines(path):\n    """Return all lines."""': em.SamplingParams(temperature=0.6, top_p=0.9, seed=1),
    'def is_empty(self):\n    """Return True if empty."""': em.SamplingParams(temperature=0.6, stop=("\n\n",), seed=2),
    'def add(self, item):\n    """Add an item."""': em.SamplingParams(repetition_penalty=1.2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="checkpoints/target")
    parser.add_argument("--head", default="checkpoints/head")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    target = em.load_target(args.target)
    engine = em.Engine(target, em.load_head(args.head, target), max_batch=len(PROMPTS))
    params = [replace(chosen, max_tokens=args.max_tokens) for chosen in PROMPTS.values()]
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]  # for the chat template
    for output in engine.generate(messages, params):
        print(output.text)
        print(f"[{len(output.tokens)} tokens in {output.rounds} forwards, ended by {output.finish_reason}]\n")


if __name__ == "__main__":
    main()
