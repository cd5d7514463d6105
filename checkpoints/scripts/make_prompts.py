"""Write the held-out prompts for eagle-bench and the demo.

    python checkpoints/scripts/make_prompts.py --output checkpoints/prompts.jsonl

Each is the signature and docstring of a function in a standard library file that training never reads, as a user
message. Functions that also occur verbatim in a training file are left out.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from eagle_mlx.data_pipelines.sources.stdlib import SourceFunction, functions_of, iter_files


def heldout_prompts(count: int, seed: int) -> list[SourceFunction]:
    """Return documented held-out functions without duplicate prompts or bodies, in an order that the seed decides."""
    learned = (function for file in iter_files("train") for function in functions_of(file))
    trained = {text for function in learned for text in (function.prompt, function.code)}
    unique: dict[str, SourceFunction] = {}
    for function in (function for file in iter_files("heldout") for function in functions_of(file)):
        if function.docstring and not {function.prompt, function.code} & trained:
            unique.setdefault(function.prompt, function)
    functions = sorted(unique.values(), key=lambda function: (function.path, function.name, function.prompt))
    random.Random(seed).shuffle(functions)
    return functions[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "prompts.jsonl")
    parser.add_argument("--count", type=int, default=160, help="how many at most (default 160)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    functions = heldout_prompts(args.count, args.seed)
    rows = [
        {"messages": [{"role": "user", "content": function.prompt}], "source": function.path} for function in functions
    ]
    args.output.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{args.output}: {len(rows)} prompts from {len({row['source'] for row in rows})} files")


if __name__ == "__main__":
    main()
