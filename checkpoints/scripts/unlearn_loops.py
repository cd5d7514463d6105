"""Second stage of the embedded target: unlearn the loops of small models in greedy decoding.

    python checkpoints/scripts/unlearn_loops.py --target checkpoints/target --minutes 8

This is sequence-level unlikelihood (Welleck et al. 2020, "Neural Text Generation with Unlikelihood Training", section
5.2). The model decodes training prompts greedily. If a 4-gram of its continuation repeats, the token that completes it
becomes less likely. Ordinary next-token training continues alongside.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import eagle_mlx as em  # first: it brings the fast BLAS before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
from mlx_lm.models import qwen3
from tokenizers import Tokenizer
from train_target import (
    Recipe,
    Shape,
    Trainer,
    finish,
    load_corpus,
    next_token_loss,
    parse_and_spread,
    save,
    use_fast_cpu_math,
)

from eagle_mlx.cpu import log_sum_exp
from eagle_mlx.data_pipelines.sources.stdlib import functions_of, iter_files

N = 4
CONTINUATION = 128


def training_prompts(tokenizer: Tokenizer, seed: int, limit: int = 200) -> list[list[int]]:
    """Return chat prompts for the training split's functions with a docstring, of at most `limit` tokens."""
    texts = [
        f"<|im_start|>user\n{f.prompt}<|im_end|>\n<|im_start|>assistant\n"
        for file in iter_files("train")
        for f in functions_of(file)
        if f.docstring
    ]
    prompts = [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    prompts = [p for p in prompts if len(p) <= limit]
    np.random.default_rng(seed).shuffle(prompts)  # type: ignore[arg-type]
    return prompts


def repeats(tokens: Sequence[int]) -> list[bool]:
    """For each token, return whether it completes an n-gram that occurred earlier in the tokens."""
    seen: set[tuple[int, ...]] = set()
    marks = []
    for end in range(1, len(tokens) + 1):
        gram = tuple(tokens[max(0, end - N) : end])
        marks.append(len(gram) == N and gram in seen)
        seen.add(gram)
    return marks


def looping_rows(prompts: list[list[int]], outputs: list[em.Output]) -> tuple[mx.array, mx.array]:
    """Return prompts with continuations [R, L] int32, right-padded, and where the next token repeats [R, L - 1]."""
    texts = [p + o.tokens for p, o in zip(prompts, outputs, strict=True)]
    marks = [[False] * len(p) + repeats(o.tokens) for p, o in zip(prompts, outputs, strict=True)]
    width = max(map(len, texts))
    tokens = mx.array([t + [0] * (width - len(t)) for t in texts], mx.int32)
    return tokens, mx.array([m[1:] + [False] * (width - len(m)) for m in marks], mx.float32)


def unlikelihood_loss(model: qwen3.Model, tokens: mx.array, marks: mx.array) -> mx.array:
    """Return the sum of -log(1 - p(token)) over marked tokens, divided by the number of the continuations' tokens."""
    logits, following = model(tokens[:, :-1]), tokens[:, 1:]
    picked = mx.take_along_axis(logits, following[..., None], axis=-1) - log_sum_exp(logits)
    against = -mx.log(mx.maximum(1 - mx.exp(picked[..., 0]), 1e-4))
    return mx.sum(against * marks) / (tokens.shape[0] * CONTINUATION)


def run(args: argparse.Namespace) -> None:
    use_fast_cpu_math()
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    first_stage = json.loads((args.target / "training.json").read_text())
    recipe = Recipe(args.rows, 256, args.muon_lr, args.adam_lr, chat_share=0.9)
    trainer = Trainer(recipe, load_corpus(tokenizer, "train", args.seed + 1), args.seed + 1)
    rank, size = trainer.group.rank(), trainer.group.size()
    trainer.model.load_weights(str(args.target / "model.safetensors"))
    trainer.model.set_dtype(mx.float32)
    mx.eval(trainer.model.parameters())
    engine = em.Engine(
        em.Target(trainer.model), em.NgramProposer(), policy=em.FixedPolicy(4), max_batch=args.decode_rows // size
    )
    prompts = training_prompts(tokenizer, args.seed)[rank::size]
    unlearn = nn.value_and_grad(trainer.model, unlikelihood_loss)
    learn = nn.value_and_grad(trainer.model, next_token_loss)
    params = em.SamplingParams(max_tokens=CONTINUATION, stop_token_ids=(0, 2))

    begin, step, log = time.monotonic(), 0, []
    while (minutes := trainer.agree_on((time.monotonic() - begin) / 60)) < args.minutes:
        trainer.set_learning_rate(max(0.02, 1 - minutes / args.minutes))
        chosen = [prompts[(step * engine.max_batch + i) % len(prompts)] for i in range(engine.max_batch)]
        outputs = engine.generate(chosen, params)
        tokens, marks = looping_rows(chosen, outputs)
        against, grads_against = unlearn(trainer.model, tokens, marks)
        loss, grads = learn(trainer.model, trainer.draw(recipe.rows // size, recipe.chat_share))
        grads = nn.utils.tree_map(lambda a, b: a + args.weight * b, grads, grads_against)
        mx.eval(loss, against, grads)
        trainer.update(grads)
        step += 1
        looping = sum(sum(repeats(o.tokens)) > 0.4 * len(o.tokens) for o in outputs) / len(outputs)
        log.append({"step": step, "minutes": round(minutes, 2), "loss": loss.item(), "looping": looping})
        if rank == 0 and step % 5 == 0:
            recent = log[-10:]
            means = {k: round(sum(x[k] for x in recent) / len(recent), 3) for k in ("loss", "looping")}
            print(f"step {step}  {minutes:.1f} min  {means}", flush=True)
    if rank == 0:
        stage = {"minutes": args.minutes, "steps": step, "weight": args.weight, "seed": args.seed}
        looping = {"looping_first": _mean(log[:10]), "looping_last": _mean(log[-10:])}
        report = {**first_stage, "unlearn_loops": {**stage, **looping}}
        args.output.mkdir(parents=True, exist_ok=True)
        save(trainer.model, Shape(), args.output, report)
        finish(trainer.model, args.output, report, load_corpus(tokenizer, "heldout", 0), recipe.length)


def _mean(log: list[dict[str, float]]) -> float:
    return round(sum(x["looping"] for x in log) / len(log), 3) if log else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of the first stage")
    parser.add_argument("--output", type=Path, help="folder that gets the weights (default: --target itself)")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=16, help="rows of next-token training per step, all processes")
    parser.add_argument("--decode-rows", type=int, default=32, help="prompts decoded per step, all processes")
    parser.add_argument("--weight", type=float, default=2.0, help="of the unlikelihood loss beside the next-token loss")
    parser.add_argument("--muon-lr", type=float, default=0.002)
    parser.add_argument("--adam-lr", type=float, default=2e-4)
    args = parse_and_spread(parser)
    args.output = args.output or args.target
    run(args)


if __name__ == "__main__":
    main()
