"""Make a small draft model for the embedded target, as a baseline for heads, by distilling the target's own layers.

    python checkpoints/scripts/make_draft_model.py --target checkpoints/target --answers answers/*.jsonl \\
        --layers 2 --cpu-minutes 60 --output out/draft

This is the best known method for so little training. The model starts as the target's embedding and a few of its layers
(Sanh et al. 2019, DistilBERT, section 3). It learns the target's whole distribution (Hinton et al. 2015) on the answers
that the head was trained on, and on the source. The budget is processor time, so a busy machine does not change it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

from eagle_mlx.cpu import fastmath  # first: it brings the fast BLAS before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from learn_own_answers import read_answers
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from tokenizers import Tokenizer
from train_target import Shape, build_model, held_out_loss, load_corpus, rows_of, save, use_fast_cpu_math

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def whole_target(folder: Path) -> qwen3.Model:
    model = build_model(Shape())
    model.load_weights(str(folder / "model.safetensors"))
    model.set_dtype(mx.float32)
    return model


def first_draft(target: qwen3.Model, shape: Shape) -> qwen3.Model:
    """Return a model of the target's embedding, norm, and layers evenly spread over its depth, with the last one."""
    model = build_model(shape)
    depth, kept = len(target.layers), shape.num_hidden_layers
    chosen = [round((i + 1) * depth / kept) - 1 for i in range(kept)]
    model.model.embed_tokens.update(target.model.embed_tokens.parameters())
    model.model.norm.update(target.model.norm.parameters())
    for mine, its in zip(model.layers, chosen, strict=True):
        mine.update(target.layers[its].parameters())
    return model


def distillation_loss(model: qwen3.Model, tokens: mx.array, wanted: mx.array) -> mx.array:
    """Return the cross entropy with the target's distribution. tokens: [B, L] int32; wanted: [B, L, V] float32."""
    logits = model(tokens)
    return mx.mean(fastmath.log_sum_exp(logits)[..., 0] - (wanted * logits).sum(axis=-1))


def train(args: argparse.Namespace) -> None:
    use_fast_cpu_math()
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    chats, _ = read_answers(args.answers)
    rng = np.random.default_rng(args.seed)
    rng.shuffle(chats)  # type: ignore[arg-type]
    own = np.array([t for e in tokenizer.encode_batch_fast(chats, add_special_tokens=False) for t in e.ids], np.int32)
    corpus = load_corpus(tokenizer, "train", args.seed)
    sources = [rows_of(stream, args.length, rng) for stream in (own, corpus.chat)]
    target, shape = whole_target(args.target), replace(Shape(), num_hidden_layers=args.layers)
    model = first_draft(target, shape)
    optimizer = optim.MultiOptimizer(
        [muon := optim.Muon(args.muon_lr, weight_decay=0.0), adam := optim.AdamW(args.adam_lr, weight_decay=0.0)],
        [lambda path, w: w.ndim == 2 and "embed" not in path],
    )
    loss_and_grad = nn.value_and_grad(model, distillation_loss)
    args.output.mkdir(parents=True)
    for name in TOKENIZER:
        shutil.copy(args.target / name, args.output / name)
    begin, step, smooth, saved = time.process_time(), 0, 0.0, 0.0
    while (minutes := (time.process_time() - begin) / 60) < args.cpu_minutes:
        progress = minutes / args.cpu_minutes
        factor = min(1.0, progress / 0.01 + 0.02) * (1 - 0.98 * progress)
        muon.learning_rate, adam.learning_rate = args.muon_lr * factor, args.adam_lr * factor
        picked = [next(sources[int(rng.random() > args.own_share)]) for _ in range(args.rows)]
        tokens = mx.array(np.stack(picked))[:, :-1]
        wanted = mx.stop_gradient(mx.softmax(target(tokens), axis=-1))
        loss, grads = loss_and_grad(model, tokens, wanted)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(model, grads)
        mx.eval(loss, model.parameters(), optimizer.state)
        smooth = loss.item() if not step else 0.98 * smooth + 0.02 * loss.item()
        step += 1
        if step % 50 == 0:
            print(f"step {step}  {minutes:.1f} processor minutes  loss {smooth:.3f}", flush=True)
        if minutes - saved > args.save_minutes:
            saved = minutes
            save(model, shape, args.output, {"step": step, "minutes": round(minutes, 1)})
    held_out = held_out_loss(model, load_corpus(tokenizer, "heldout", 0).chat, args.length)
    size = sum(v.size for _, v in tree_flatten(model.parameters()))
    report = {"steps": step, "processor_minutes": args.cpu_minutes, "parameters": size, "held_out_loss": held_out}
    report["tokens"] = step * args.rows * args.length
    save(model, shape, args.output, report)
    print(json.dumps(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--answers", type=Path, nargs="+", required=True, help="files of eagle-data regenerate")
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--cpu-minutes", type=float, default=60.0, help="processor time to train for")
    parser.add_argument("--save-minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--own-share", type=float, default=0.7, help="rows of the target's own answers")
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--adam-lr", type=float, default=1e-3)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
