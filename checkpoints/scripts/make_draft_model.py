"""Make a small draft model for a target, as a baseline for heads, by distilling the target's own layers.

    python checkpoints/scripts/make_draft_model.py --target checkpoints/target --answers answers/*.jsonl \\
        --layers 1 --cpu-minutes 60 --output out/draft

This is the best known method for so little training. The model starts as the target's embedding and a few of its layers
(Sanh et al. 2019, DistilBERT, section 3). It learns the target's distribution (Hinton et al. 2015) on the answers that
the target wrote. The budget is processor time, so a busy machine does not change it. The target is any model of mlx-lm
whose layers are alike.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from eagle_mlx.cpu import log_sum_exp, softmax  # first: it brings the fast BLAS before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, load_tokenizer
from train_target import use_fast_cpu_math

from eagle_mlx.data_pipelines import DataConfig, read_conversations
from eagle_mlx.data_pipelines.rendering import examine

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Stream(NamedTuple):
    """Rendered conversations, one after the other."""

    tokens: np.ndarray  # [N] int32
    answers: np.ndarray  # [N] bool: the tokens that the target wrote


class Rows(NamedTuple):
    """A batch to learn from. The model learns what the target would write at each position that counts."""

    tokens: mx.array  # [B, L] int32
    counts: mx.array  # [B, L] float32


def choose_layers(depth: int, kept: int) -> list[int]:
    """Return `kept` layers of a target of `depth` layers: spread evenly, the first and the last among them."""
    return [depth - 1] if kept == 1 else [round(i * (depth - 1) / (kept - 1)) for i in range(kept)]


def cut(folder: Path, kept: int) -> tuple[Any, dict[str, Any]]:
    """Return a model of the target's embedding, norm and some of its layers, in float32, and its config."""
    target, config = load_model(folder)
    model, config = load_model(folder, strict=False, model_config={"num_hidden_layers": kept})
    for layer, source in zip(model.layers, choose_layers(len(target.layers), kept), strict=True):
        layer.update(target.layers[source].parameters())
    model.set_dtype(mx.float32)
    return model, config


def read_streams(folder: Path, answers: list[Path]) -> tuple[Stream, Stream]:
    """Return conversations to learn from, and one in 25 that is held out."""
    tokenizer = load_tokenizer(folder)
    streams = []
    for split in ("train", "heldout"):
        conversations = read_conversations(DataConfig(tuple(map(str, answers))), split)
        rendered = [examine(tokenizer, conversation)[0][:2] for conversation in conversations]
        tokens, mask = (
            np.concatenate([np.array(part, np.int32) for part in parts]) for parts in zip(*rendered, strict=True)
        )
        streams.append(Stream(tokens, mask > 0))
    return streams[0], streams[1]


def batches(stream: Stream, rows: int, length: int, rng: np.random.Generator) -> Iterator[Rows]:
    """Yield batches endlessly. Each pass cuts the stream from a new offset, in a new order."""
    while True:
        starts = np.arange(int(rng.integers(length)), len(stream.tokens) - length, length)
        rng.shuffle(starts)
        for at in range(0, len(starts) - rows + 1, rows):
            where = starts[at : at + rows, None] + np.arange(length)
            yield Rows(mx.array(stream.tokens[where]), mx.array(stream.answers[where + 1].astype(np.float32)))


def frequent(stream: Stream, size: int) -> mx.array:
    """Return the ids of the `size` most frequent tokens."""
    return mx.array(np.sort(np.argsort(-np.bincount(stream.tokens), kind="stable")[:size]).astype(np.int32))


class Distillation:
    """The loss of a draft model against its target, over all tokens or the frequent ones."""

    def __init__(self, target: Any, ids: mx.array | None):
        self._target, self._ids = target, ids
        self._rows = None if ids is None else target.model.embed_tokens.weight[ids]

    def logits(self, model: Any, tokens: mx.array) -> mx.array:
        return model(tokens) if self._rows is None else model.model(tokens) @ self._rows.T

    def loss(self, model: Any, rows: Rows, wanted: mx.array) -> mx.array:
        """Return the cross entropy with the target's distribution. wanted: [B, L, V] float32."""
        logits = self.logits(model, rows.tokens)
        losses = log_sum_exp(logits)[..., 0] - (wanted * logits).sum(axis=-1)
        return (losses * rows.counts).sum() / mx.maximum(rows.counts.sum(), 1)

    def wanted(self, tokens: mx.array) -> mx.array:
        return softmax(self.logits(self._target, tokens))

    def agreement(self, model: Any, rows: Rows) -> float:
        """Return the share of an answer's tokens for which the model's first choice is the target's."""
        same = self.logits(model, rows.tokens).argmax(-1) == self.logits(self._target, rows.tokens).argmax(-1)
        return ((same * rows.counts).sum() / mx.maximum(rows.counts.sum(), 1)).item()


def save(model: Any, config: dict[str, Any], folder: Path, report: dict[str, Any]) -> None:
    """Write weights in bfloat16, config and report. Weights are written atomically."""
    weights = {k: v.astype(mx.bfloat16) for k, v in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "part.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "part.safetensors").rename(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}, indent=2) + "\n")
    (folder / "training.json").write_text(json.dumps(report, indent=2) + "\n")


def train(args: argparse.Namespace) -> None:
    use_fast_cpu_math()
    learned, held_out = read_streams(args.target, args.answers)
    target, _ = load_model(args.target)
    target.set_dtype(mx.float32)
    model, config = cut(args.target, args.layers)
    distillation = Distillation(target, frequent(learned, args.loss_vocab) if args.loss_vocab else None)
    if args.loss_vocab:  # the other tokens' rows would get no gradient
        model.model.embed_tokens.freeze()
    optimizer = optim.MultiOptimizer(
        [muon := optim.Muon(args.muon_lr, weight_decay=0.0), adam := optim.AdamW(args.adam_lr, weight_decay=0.0)],
        [lambda path, w: w.ndim == 2 and "embed" not in path],
    )
    loss_and_grad = nn.value_and_grad(model, distillation.loss)
    judged = next(batches(held_out, 16, args.length, np.random.default_rng(0)))
    args.output.mkdir(parents=True)
    for name in TOKENIZER:
        shutil.copy(args.target / name, args.output / name)
    source = batches(learned, args.rows, args.length, np.random.default_rng(args.seed))
    report = {
        "tokens": 0,
        "different_tokens": len(learned.tokens),
        "layers": choose_layers(len(target.layers), args.layers),
    }
    begin, start, step, smooth, saved = time.process_time(), time.monotonic(), 0, 0.0, 0.0
    print(f"{len(learned.tokens):,} tokens; agreement {distillation.agreement(model, judged):.3f} at first", flush=True)
    while True:
        minutes, waited = (time.process_time() - begin) / 60, (time.monotonic() - start) / 60
        progress = max(minutes / args.cpu_minutes, waited / args.minutes if args.minutes else 0)
        if progress >= 1:
            break
        factor = min(1.0, progress / 0.01 + 0.02) * (1 - 0.98 * progress)
        muon.learning_rate, adam.learning_rate = args.muon_lr * factor, args.adam_lr * factor
        rows = next(source)
        loss, grads = loss_and_grad(model, rows, mx.stop_gradient(distillation.wanted(rows.tokens)))
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(model, grads)
        mx.eval(loss, model.parameters(), optimizer.state)
        smooth = loss.item() if not step else 0.98 * smooth + 0.02 * loss.item()
        step += 1
        report |= {"steps": step, "tokens": step * args.rows * args.length, "processor_minutes": round(minutes, 1)}
        if step % 20 == 0:
            print(f"step {step}  {minutes:.1f} processor minutes, {waited:.1f} in all  loss {smooth:.3f}", flush=True)
        if minutes - saved > args.save_minutes:
            saved = minutes
            save(model, config, args.output, report)
    report |= {"agreement": round(distillation.agreement(model, judged), 3)}
    report |= {"parameters": sum(v.size for _, v in tree_flatten(model.parameters()))}
    save(model, config, args.output, report)
    print(json.dumps(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of the model")
    parser.add_argument("--answers", type=Path, nargs="+", required=True, help="files of eagle-data regenerate or make")
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--cpu-minutes", type=float, default=60.0, help="processor time to train for")
    parser.add_argument("--minutes", type=float, help="end after this time, even if processor time is left")
    parser.add_argument("--save-minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument(
        "--loss-vocab",
        type=int,
        metavar="N",
        help="learn the distribution over the N most frequent tokens, and keep the embedding",
    )
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--adam-lr", type=float, default=1e-3)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
