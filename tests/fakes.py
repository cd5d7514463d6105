"""Tiny models with random weights, real in everything but their size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import eagle_mlx  # noqa: F401  (brings the fast BLAS before MLX)

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import qwen3
from mlx_lm.tokenizer_utils import load as load_tokenizer

from eagle_mlx.heads.eagle3 import Eagle3Config, Eagle3Head, default_aux_layers
from eagle_mlx.target import Target

EMBEDDED_TARGET = Path(__file__).parent.parent / "checkpoints" / "target"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def tiny_config(layers: int = 4, hidden: int = 32, vocab: int = 128) -> dict[str, object]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }


def _randomize(module: nn.Module, seed: int, spread: float) -> None:
    """Weights far enough from zero that outputs depend on every part of the input."""
    rng = np.random.default_rng(seed)

    def draw(w: mx.array) -> mx.array:
        new = rng.normal(0.0, spread, w.shape) if w.ndim > 1 else rng.uniform(0.5, 1.5, w.shape)
        return mx.array(new, mx.float32)

    module.update(tree_map(draw, module.parameters()))
    mx.eval(module.parameters())


def tiny_target(seed: int = 0, layers: int = 4, hidden: int = 32, vocab: int = 128, tokenizer: bool = False) -> Target:
    """A random Qwen3 in memory; with the embedded tokenizer where asked for (then `vocab` is its 4,096)."""
    vocab = 4096 if tokenizer else vocab
    model = qwen3.Model(qwen3.ModelArgs(**tiny_config(layers, hidden, vocab)))  # type: ignore[arg-type]
    _randomize(model, seed, 0.2)
    return Target(model, load_tokenizer(EMBEDDED_TARGET) if tokenizer else None, name="tiny")


def tiny_head(target: Target, seed: int = 0, draft_vocab: int | None = None) -> Eagle3Head:
    """A random EAGLE-3 head that fits the target; `draft_vocab` entries spread over the vocabulary, or all."""
    size = draft_vocab or target.vocab_size
    config = Eagle3Config(
        hidden_size=target.hidden_size,
        intermediate_size=2 * target.hidden_size,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=target.vocab_size,
        draft_vocab_size=size,
        target_hidden_size=target.hidden_size,
        aux_layers=default_aux_layers(target.num_layers),
    )
    d2t = None
    if size < target.vocab_size:
        kept = np.sort(np.random.default_rng(seed).choice(target.vocab_size, size, replace=False))
        d2t = mx.array(kept - np.arange(size), mx.int32)
    head = Eagle3Head(config, d2t)
    _randomize(head, seed + 1, 0.2)
    return head


def tiny_target_folder(folder: Path, seed: int = 0, layers: int = 4, hidden: int = 32) -> Path:
    """A random Qwen3 with the embedded tokenizer, on disk as mlx-lm loads it."""
    target = tiny_target(seed, layers, hidden, tokenizer=True)
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copy(EMBEDDED_TARGET / name, folder / name)
    weights = {k: v.astype(mx.float16) for k, v in tree_flatten(target.model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**tiny_config(layers, hidden, 4096), "eos_token_id": [2, 0]}))
    return folder
