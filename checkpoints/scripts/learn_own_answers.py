"""Third stage of the embedded target: learn from the best of its own answers.

    eagle-data regenerate --target checkpoints/target --data builtin:python-chat --split train --max-tokens 128 \\
        --least-distinct 0.6 --batch 32 --output answers.jsonl
    python checkpoints/scripts/learn_own_answers.py --target checkpoints/target --answers answers.jsonl --minutes 10

This is rejection-sampling fine-tuning, as in the post-training of large models (Touvron et al. 2023, Llama 2, section
3.2.3). The model answers training prompts; answers that are not valid Python are rejected. It learns from the others
and the original pairs, and becomes more confident, like the chat models that people use.
"""

from __future__ import annotations

import argparse
import ast
import json
import time
import warnings
from pathlib import Path

import mlx.core as mx  # isort: skip
import numpy as np
from tokenizers import Tokenizer
from train_target import Corpus, Recipe, Shape, Trainer, finish, load_corpus, parse_and_spread, save, use_fast_cpu_math


def is_python(text: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            return False
    return True


def read_answers(files: list[Path]) -> tuple[list[str], int]:
    """Return the distinct chats whose answer is valid Python, and the total number of chats."""
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    chats = {}
    for row in rows:
        user, assistant = (message["content"] for message in row["messages"])
        if is_python(assistant):
            text = f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{assistant}<|im_end|>\n"
            chats[text] = None
    return list(chats), len(rows)


def run(args: argparse.Namespace) -> None:
    use_fast_cpu_math()
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    before = json.loads((args.target / "training.json").read_text())
    chats, answers = read_answers(args.answers)
    np.random.default_rng(args.seed).shuffle(chats)  # type: ignore[arg-type]
    encoded = tokenizer.encode_batch_fast(chats, add_special_tokens=False)
    own = np.array([token for e in encoded for token in e.ids], np.int32)
    original = load_corpus(tokenizer, "train", args.seed + 2)
    recipe = Recipe(args.rows, 256, args.muon_lr, args.adam_lr, chat_share=args.own_share, decay_from=0.0)
    trainer = Trainer(recipe, Corpus(own, original.chat, 0, 0), args.seed + 2)
    trainer.model.load_weights(str(args.target / "model.safetensors"))
    trainer.model.set_dtype(mx.float32)
    first = trainer.group.rank() == 0
    if first:
        print(f"{len(chats):,} of {answers:,} answers are valid Python and told apart, {len(own):,} tokens", flush=True)

    begin, step, losses = time.monotonic(), 0, []
    while (minutes := trainer.agree_on((time.monotonic() - begin) / 60)) < args.minutes:
        losses.append(trainer.step(minutes / args.minutes, micro_rows=8)[0])
        step += 1
        if first and step % 10 == 0:
            print(f"step {step}  {minutes:.1f} min  loss {np.mean(losses[-20:]):.3f}", flush=True)
    if first:
        stage = {"minutes": args.minutes, "steps": step, "answers": answers, "kept": len(chats), "own_tokens": len(own)}
        report = {**before, "own_answers": {**stage, "own_share": args.own_share, "seed": args.seed}}
        args.output.mkdir(parents=True, exist_ok=True)
        save(trainer.model, Shape(), args.output, report)
        finish(trainer.model, args.output, report, load_corpus(tokenizer, "heldout", 0), recipe.length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of the second stage")
    parser.add_argument("--output", type=Path, help="folder that gets the weights (default: --target itself)")
    parser.add_argument("--answers", type=Path, nargs="+", required=True, help="files of eagle-data regenerate")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=32, help="rows of a step, all processes")
    parser.add_argument("--own-share", type=float, default=0.6, help="rows of own answers at the start; 0.9 at the end")
    parser.add_argument("--muon-lr", type=float, default=0.006)
    parser.add_argument("--adam-lr", type=float, default=6e-4)
    args = parse_and_spread(parser)
    args.output = args.output or args.target
    run(args)


if __name__ == "__main__":
    main()
