"""Measure τ of answers about images and of answers about text, for n-grams, draft models and heads of any kind.

    python benchmarks/images.py --target mlx-community/Qwen3.5-9B-4bit --head out/mtp out/eagle3 --images shots/*.png
    python benchmarks/images.py --target out/reader/model --head out/mtp --pictures out/reader/questions.jsonl

Each image gets all questions; as many answers to `--prompts` have no images. With `--pictures`, which picture_reader.py
makes, the same questions are asked as pictures and as text. Answers that loop are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import eagle_mlx as em
from eagle_mlx.heads import kind_of
from eagle_mlx.machine import describe
from eagle_mlx.paired import Decoded, tau, tau_interval
from eagle_mlx.serve.prompts import read_questions
from eagle_mlx.text import is_loop

QUESTIONS = (
    "What does this image show?",
    "Write down the text in this image, line by line.",
    "What would you change in what this image shows, and why?",
)


def about(images: Sequence[Path]) -> list[list[dict[str, Any]]]:
    """Return conversations in which each image gets all questions."""
    asked = [(str(image), question) for image in images for question in QUESTIONS]
    return [
        [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]
        for image, text in asked
    ]


def read_pictures(path: Path) -> tuple[list[list[dict[str, Any]]], list[list[dict[str, Any]]]]:
    """Return the questions of a file as pictures and as text."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    pictures = [[{"role": "user", "content": [{"type": "image", "image": row["image"]}]}] for row in rows]
    return pictures, [[{"role": "user", "content": row["prompt"]}] for row in rows]


def measured(engine: em.Engine, prompts: Sequence[Any], params: em.SamplingParams) -> str:
    """Decode answers one by one. Return τ, its interval and the number of answers, in words."""
    outputs = [engine.generate(prompt, params) for prompt in prompts]
    kept = [Decoded(len(output.tokens), output.rounds) for output in outputs if not is_loop(output.tokens)]
    interval = tau_interval(kept)
    spread = "" if interval is None else f" ± {interval:.2f}"
    return f"{tau(kept):.2f}{spread} ({len(kept)} of {len(outputs)} answers)"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or hub id of a model that sees")
    parser.add_argument("--head", nargs="*", default=[], help="folders or hub ids of its heads")
    parser.add_argument("--draft-model", nargs="*", default=[], help="folders or hub ids of smaller models")
    images = parser.add_mutually_exclusive_group(required=True)
    images.add_argument("--images", type=Path, nargs="+", help="files of images")
    images.add_argument("--pictures", type=Path, help="questions.jsonl of picture_reader.py")
    parser.add_argument("--prompts", type=Path, default=Path("checkpoints/questions.jsonl"), help="jsonl (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=200, help="tokens of an answer (%(default)s)")
    parser.add_argument("--depth", type=int, default=4, help="draft tokens per round (%(default)s)")
    args = parser.parse_args(argv)
    target = em.load_target(args.target)
    heads = [em.load_head(name, target, check=False) for name in args.head]
    proposers: dict[str, Any] = {"n-grams": em.NgramProposer()}
    proposers |= {f"{kind_of(head).title} ({name})": head for name, head in zip(args.head, heads, strict=True)}
    proposers |= {f"draft model ({name})": em.DraftModelProposer(em.load_target(name)) for name in args.draft_model}
    texts: Sequence[Any]
    if args.pictures is not None:
        with_images, texts = read_pictures(args.pictures)
    else:
        with_images = about(args.images)
        questions = read_questions(args.prompts, len(with_images))
        texts = [question.encode(target, max_tokens=args.max_tokens) for question in questions]
    params = em.SamplingParams(max_tokens=args.max_tokens)
    print(f"{describe()}\n\n| drafts | τ with images | τ with text |\n|---|---|---|")
    for name, proposer in proposers.items():
        engine = em.Engine(target, proposer, policy=em.FixedPolicy(args.depth))
        cells = (measured(engine, prompts, params) for prompts in (with_images, texts))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
