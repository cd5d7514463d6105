"""Make multiple-choice questions from the standard library: which body belongs to this function?"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import random
from pathlib import Path

MODULES = (
    *("argparse", "bisect", "calendar", "cmd", "codecs", "colorsys", "configparser", "copy", "csv", "datetime"),
    *("difflib", "fnmatch", "fractions", "glob", "heapq", "inspect", "ipaddress", "posixpath", "shutil", "statistics"),
    *("string", "tarfile", "textwrap", "tokenize", "zipfile"),
)


def bodies() -> list[tuple[str, str]]:
    """Return signatures and short bodies of functions."""
    pairs = []
    for name in MODULES:
        source = inspect.getsource(__import__(name))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                lines = (ast.get_source_segment(source, node) or "").splitlines()
                start = next((i for i, line in enumerate(lines) if line.rstrip().endswith(":")), None)
                if start is not None and 1 < len(lines) - start <= 8 and ast.get_docstring(node) is None:
                    pairs.append(("\n".join(lines[: start + 1]), "\n".join(lines[start + 1 :])))
    return pairs


def main() -> None:
    """Write a row per function, with its own body and three others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("questions.jsonl"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=100)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    pairs = rng.sample(bodies(), args.limit)
    rows = []
    for signature, body in pairs:
        choices = [body, *rng.sample([other for _, other in pairs if other != body], 3)]
        rng.shuffle(choices)
        rows.append({"question": signature, "choices": [f"\n{c}" for c in choices], "answer": choices.index(body)})
    args.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} questions in {args.output}")


if __name__ == "__main__":
    main()
