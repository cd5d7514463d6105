"""Train the embedded target, a deep and narrow Qwen3 that writes Python, for a given time.

    python checkpoints/scripts/train_target.py --output checkpoints/target --minutes 60

On a CPU it runs one process per core with one BLAS thread each, which is faster than one process with several. On a GPU
it runs one process (--processes 1). Run make_tokenizer.py first: the output folder must have the tokenizer. Checkpoints
are written every few minutes, so an interrupted run leaves the last one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from eagle_mlx.cpu import log_sum_exp, softmax, use_shortcuts  # first: it brings the fast BLAS before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import qwen3
from tokenizers import Tokenizer

from eagle_mlx.data_pipelines.sources.stdlib import SourceFunction, Split, functions_of, iter_files

END_OF_TEXT = 0
MAX_ANSWER_CHARS = 700


@dataclass(frozen=True)
class Shape:
    """The target's architecture, with the names of its config.json."""

    model_type: str = "qwen3"
    hidden_size: int = 192
    num_hidden_layers: int = 14
    intermediate_size: int = 512
    num_attention_heads: int = 3
    num_key_value_heads: int = 1
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    vocab_size: int = 4096
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = True


@dataclass(frozen=True)
class Recipe:
    rows: int
    """Rows per step, over all processes."""
    length: int
    muon_lr: float
    adam_lr: float
    chat_share: float
    """The share of rows that are chat pairs. It rises to 0.9 while the learning rate falls."""
    decay_from: float = 0.55
    """The fraction of the time after which the learning rates fall linearly to 2%."""


def use_fast_cpu_math() -> None:
    """On a CPU, train with functions that avoid MLX's slow exponentials but compute the same."""
    if not use_shortcuts():
        return
    causal = mx.triu(mx.full((512, 512), -1e9), k=1)
    mx.eval(causal)
    library = qwen3.scaled_dot_product_attention

    def attend(q: mx.array, k: mx.array, v: mx.array, *, cache: Any, scale: float, mask: Any) -> mx.array:
        if cache is not None:
            return library(q, k, v, cache=cache, scale=scale, mask=mask)
        b, hq, length, d = q.shape
        grouped = (q * scale).reshape(b, k.shape[1], -1, length, d)
        weights = softmax(grouped @ k[:, :, None].swapaxes(-1, -2) + causal[:length, :length])
        return (weights @ v[:, :, None]).reshape(b, hq, length, d)

    qwen3.scaled_dot_product_attention = attend


def chat_text(function: SourceFunction) -> str:
    return f"<|im_start|>user\n{function.prompt}<|im_end|>\n<|im_start|>assistant\n{function.code}<|im_end|>\n"


def token_streams(tokenizer: Tokenizer, split: Split, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the split's chat pairs and plain files as two token streams, and the chat pairs' bytes.

    Functions with a docstring occur three times in training, because they are the target's purpose.
    """
    files = list(iter_files(split))
    pairs: dict[str, SourceFunction] = {}
    for file in files:
        for function in functions_of(file):
            if len(function.code) <= MAX_ANSWER_CHARS:
                pairs.setdefault(function.code, function)
    texts = [chat_text(f) for f in pairs.values() for _ in range(3 if f.docstring and split == "train" else 1)]
    rng.shuffle(texts)
    size = sum(len(t.encode()) for t in texts)
    chat = [t for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False) for t in e.ids]
    plain_texts = [f.text for f in files]
    rng.shuffle(plain_texts)
    encoded = tokenizer.encode_batch_fast(plain_texts, add_special_tokens=False)
    plain = [t for e in encoded for t in (*e.ids, END_OF_TEXT)]
    return np.array(chat, np.int32), np.array(plain, np.int32), size


def rows_of(stream: np.ndarray, length: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield rows of length + 1 endlessly. Each epoch cuts the stream from a new offset, in a new order."""
    while True:
        start = int(rng.integers(length))
        starts = np.arange(start, len(stream) - length - 1, length)
        rng.shuffle(starts)
        for s in starts:
            yield stream[s : s + length + 1]


def build_model(shape: Shape) -> qwen3.Model:
    model = qwen3.Model(qwen3.ModelArgs(**asdict(shape)))
    for layer in model.layers:
        layer.self_attn.o_proj.weight *= 0
        layer.mlp.down_proj.weight *= 0
    mx.eval(model.parameters())
    return model


def next_token_loss(model: qwen3.Model, rows: mx.array) -> mx.array:
    logits, targets = model(rows[:, :-1]), rows[:, 1:]
    picked = mx.take_along_axis(logits, targets[..., None], axis=-1)
    return mx.mean(log_sum_exp(logits) - picked)


def held_out_loss(model: qwen3.Model, stream: np.ndarray, length: int, limit: int = 256) -> float:
    """Return the mean loss per token over consecutive rows of the stream."""
    starts = range(0, len(stream) - length - 1, length)
    rows = np.stack([stream[s : s + length + 1] for s in list(starts)[:limit]])
    losses = [
        next_token_loss(model, mx.array(rows[i : i + 8])).item() * len(rows[i : i + 8]) for i in range(0, len(rows), 8)
    ]
    return sum(losses) / len(rows)


def learning_rate_factor(progress: float, recipe: Recipe) -> float:
    warm_up = min(1.0, progress / 0.01 + 0.02)
    fall = (progress - recipe.decay_from) / (1 - recipe.decay_from)
    return warm_up * (1 - 0.98 * max(0.0, min(1.0, fall)))


def save(model: qwen3.Model, shape: Shape, folder: Path, report: dict[str, Any]) -> None:
    """Write weights in bfloat16, config and report. Weights are written atomically."""
    weights = {k: v.astype(mx.bfloat16) for k, v in tree_flatten(model.parameters())}
    part = folder / "part.safetensors"
    mx.save_safetensors(str(part), weights, metadata={"format": "mlx"})
    part.rename(folder / "model.safetensors")
    config = {"architectures": ["Qwen3ForCausalLM"], **asdict(shape), "eos_token_id": [2, 0], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "training.json").write_text(json.dumps(report, indent=2) + "\n")


@dataclass
class Corpus:
    """The token streams of one split."""

    chat: np.ndarray
    plain: np.ndarray
    chat_bytes: int
    plain_bytes: int


class Trainer:
    """One process of a data-parallel run. All processes have the same weights; each draws its own rows."""

    def __init__(self, recipe: Recipe, corpus: Corpus, seed: int):
        self.recipe = recipe
        self.group = mx.distributed.init()
        mx.random.seed(seed)
        self.model = build_model(Shape())
        self.muon = optim.Muon(recipe.muon_lr, weight_decay=0.0)
        self.adam = optim.AdamW(recipe.adam_lr, betas=[0.9, 0.95], weight_decay=0.0)
        self.optimizer = optim.MultiOptimizer(
            [self.muon, self.adam], [lambda path, w: w.ndim == 2 and "embed" not in path]
        )
        self.loss_and_grad = nn.value_and_grad(self.model, next_token_loss)
        self.rng = np.random.default_rng([seed, self.group.rank()])
        self.sources = [rows_of(stream, recipe.length, self.rng) for stream in (corpus.chat, corpus.plain)]

    def agree_on(self, value: float) -> float:
        """Return the first process's value in all processes."""
        own = value if self.group.rank() == 0 else 0.0
        return float(mx.distributed.all_sum(mx.array(own), group=self.group).item())

    def step(self, progress: float, micro_rows: int) -> tuple[float, float]:
        """Make one update at this fraction of the run. Return the loss and the gradient's norm."""
        recipe = self.recipe
        falling = max(0.0, (progress - recipe.decay_from) / (1 - recipe.decay_from))
        chat_share = recipe.chat_share + (0.9 - recipe.chat_share) * falling
        self.set_learning_rate(learning_rate_factor(progress, recipe))
        count = recipe.rows // self.group.size()
        rows = self.draw(count, chat_share)
        loss, grads = 0.0, None
        pieces = mx.split(rows, max(1, count // micro_rows))
        for piece in pieces:
            piece_loss, piece_grads = self.loss_and_grad(self.model, piece)
            grads = piece_grads if grads is None else tree_map(mx.add, grads, piece_grads)
            mx.eval(piece_loss, grads)
            loss += piece_loss.item() / len(pieces)
        return loss, self.update(tree_map(partial(mx.multiply, 1 / len(pieces)), grads))

    def set_learning_rate(self, factor: float) -> None:
        self.muon.learning_rate = self.recipe.muon_lr * factor
        self.adam.learning_rate = self.recipe.adam_lr * factor

    def draw(self, count: int, chat_share: float) -> mx.array:
        """Return rows [count, length + 1] int32 for this process."""
        return mx.array(np.stack([next(self.sources[int(self.rng.random() > chat_share)]) for _ in range(count)]))

    def update(self, grads: Any) -> float:
        """Average the gradients over the processes and take a step. Return the gradient's norm before clipping."""
        grads, norm = optim.clip_grad_norm(nn.average_gradients(grads), 1.0)
        self.optimizer.update(self.model, grads)
        mx.eval(self.model.parameters(), self.optimizer.state)
        return float(norm.item())


def load_corpus(tokenizer: Tokenizer, split: Split, seed: int) -> Corpus:
    chat, plain, chat_bytes = token_streams(tokenizer, split, np.random.default_rng(seed))
    return Corpus(chat, plain, chat_bytes, sum(len(file.text.encode()) for file in iter_files(split)))


def train(args: argparse.Namespace, recipe: Recipe) -> None:
    use_fast_cpu_math()
    tokenizer = Tokenizer.from_file(str(args.output / "tokenizer.json"))
    corpus = load_corpus(tokenizer, "train", args.seed)
    trainer = Trainer(recipe, corpus, args.seed)
    first = trainer.group.rank() == 0
    if first:
        print(f"{len(corpus.chat) / 1e6:.2f} M chat and {len(corpus.plain) / 1e6:.2f} M plain tokens", flush=True)
    begin, step, last_save, smooth = time.monotonic(), 0, 0.0, math.nan
    with (args.output / "training_log.jsonl" if first else Path(os.devnull)).open("w") as log:
        while (minutes := trainer.agree_on((time.monotonic() - begin) / 60)) < args.minutes:
            loss, norm = trainer.step(minutes / args.minutes, args.micro_rows)
            if not math.isfinite(loss):
                raise SystemExit(f"the loss is {loss} at step {step}; lower --muon-lr or --adam-lr")
            step += 1
            smooth = loss if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss
            so_far = {"step": step, "minutes": round(minutes, 2), "tokens": step * recipe.rows * recipe.length}
            if first and step % 20 == 0:
                print(
                    json.dumps({**so_far, "loss": round(smooth, 4), "grad_norm": round(norm, 3)}), file=log, flush=True
                )
                print(f"{so_far}  loss {smooth:.4f}", flush=True)
            if first and minutes - last_save > args.save_minutes:
                last_save = minutes
                save(trainer.model, Shape(), args.output, so_far)
    if first:
        report = {"seed": args.seed, **so_far, "processes": trainer.group.size(), "recipe": asdict(recipe)}
        finish(trainer.model, args.output, report, load_corpus(tokenizer, "heldout", 0), recipe.length)


def finish(model: qwen3.Model, folder: Path, report: dict[str, Any], held_out: Corpus, length: int) -> None:
    """Round the weights to their stored type, measure them on the held-out files, and save them and the measurement."""
    model.update(tree_map(lambda w: w.astype(mx.bfloat16).astype(mx.float32), model.parameters()))
    report["parameters"] = sum(v.size for _, v in tree_flatten(model.parameters()))
    report["device"] = str(mx.default_device())
    report["held_out"] = {}
    for name, stream, size in (
        ("chat", held_out.chat, held_out.chat_bytes),
        ("plain", held_out.plain, held_out.plain_bytes),
    ):
        loss = held_out_loss(model, stream, length)
        report["held_out"][name] = {"loss_per_token": loss, "loss_per_byte": loss * len(stream) / size}
    save(model, Shape(), folder, report)
    print(json.dumps(report, indent=2), flush=True)


def run_processes(count: int) -> int:
    """Run this command once per core, joined by MLX's ring over loopback. Return the worst exit code.

    mlx.launch does the same, but its monitor polls continuously and takes half a core.
    """
    ports = []
    for _ in range(count):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    with tempfile.NamedTemporaryFile("w", suffix=".json") as hosts:
        json.dump([[f"127.0.0.1:{port}"] for port in ports], hosts)
        hosts.flush()
        one_thread = {"OPENBLAS_NUM_THREADS": "1", "MLX_HOSTFILE": hosts.name}
        # Every step allocates and frees large buffers. Keep them in the heap to avoid fresh pages.
        keep_pages = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_ARENA_MAX": "1"}
        workers = [
            subprocess.Popen(
                [sys.executable, *sys.argv], env={**os.environ, **one_thread, **keep_pages, "MLX_RANK": str(rank)}
            )
            for rank in range(count)
        ]
        return max(worker.wait() for worker in workers)


def parse_and_spread(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments, --processes among them. If there are several processes, run them and exit."""
    cores = (os.cpu_count() or 1) if mx.default_device() == mx.Device(mx.cpu) else 1
    parser.add_argument("--processes", type=int, default=cores, help="data-parallel processes (default: %(default)s)")
    args = parser.parse_args()
    if args.processes > 1 and "MLX_RANK" not in os.environ:
        sys.exit(run_processes(args.processes))
    return args


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder with tokenizer.json; gets the weights")
    parser.add_argument("--minutes", type=float, default=60.0, help="time budget; the schedule is laid over it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=32, help="rows of a step over all processes")
    parser.add_argument("--micro-rows", type=int, default=8, help="rows of one forward and backward")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--chat-share", type=float, default=0.6)
    parser.add_argument("--save-minutes", type=float, default=5.0)
    args = parse_and_spread(parser)
    recipe = Recipe(args.rows, args.length, args.muon_lr, args.adam_lr, args.chat_share)
    train(args, recipe)


if __name__ == "__main__":
    main()
