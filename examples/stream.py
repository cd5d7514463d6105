"""Print a text while it is generated; chunks with accepted drafts are green. Then print the speed.

`stream` yields a chunk after each round, often of several tokens: a round emits the accepted drafts and one token of
the target. Run it in the folder of the repository:

    python examples/stream.py "def fibonacci(n):"
"""

import argparse
import time

import eagle_mlx as em


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="def fibonacci(n):")
    parser.add_argument("--target", default="checkpoints/target")
    parser.add_argument("--head", default="checkpoints/head")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()

    target = em.load_target(args.target)
    curve = em.learn_costs(target)  # measures forwards once per machine and model, so that the first text is fast, too
    engine = em.Engine(target, em.load_head(args.head, target), policy=em.ThroughputPolicy(curve=curve))
    messages = [{"role": "user", "content": args.prompt}]  # a list of messages goes through the chat template
    start = time.perf_counter()
    for chunk in engine.stream(messages, em.SamplingParams(max_tokens=args.max_tokens)):
        color = "\x1b[32m" if any(chunk.from_draft) else ""
        print(f"{color}{chunk.text}\x1b[0m", end="", flush=True)
    output, seconds = chunk.output, time.perf_counter() - start
    assert output is not None  # the last chunk has it
    print(f"\n[{len(output.tokens)} tokens, {len(output.tokens) / seconds:.0f} per second]")
    print(f"[{output.acceptance_length:.2f} tokens per forward, {output.accepted} of {output.drafted} drafts accepted]")


if __name__ == "__main__":
    main()
