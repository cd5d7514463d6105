"""SafeAILab's layout for EAGLE-1 and EAGLE-2: `fc`, `layers.*` (the first without input norm) and `embed_tokens`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import mlx.core as mx

from eagle_mlx.errors import CheckpointError
from eagle_mlx.formats.fields import (
    layer_fields,
    quantization_json,
    read_config,
    read_quantization,
    reading,
    refuse,
    warn_of_unknown,
    window_json,
)
from eagle_mlx.formats.tensors import (
    SaveOptions,
    fill,
    layer_width,
    read_weights,
    save_head,
    with_embedding,
    without_copy,
)
from eagle_mlx.heads.eagle.head import EagleConfig, EagleHead
from eagle_mlx.heads.precision import make_quantized

ARCHITECTURE = "LlamaForCausalLMEagle"
"""Name in SGLang; SafeAILab's own loader does not check it."""


def save_eagle(head: EagleHead, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    """Write a head to a folder, which appears only once complete.

    Other loaders expect an embedding in the file. It is the head's own or else the target's, so attach one first.
    Quantized weights stay quantized, and other loaders cannot read them. Raises HeadError if there is neither an
    embedding nor a target, OutputError if the folder cannot be written.
    """
    weights, noted = with_embedding(head)
    fields = dataclasses.asdict(head.config)
    del fields["own_embedding"], fields["windows"], fields["qk_norm"], fields["quantization"]
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **fields,
        "eagle_fc_bias": head.config.bias,
        **window_json(head.config.windows),
        **quantization_json(head.config.quantization),
    }
    save_head(folder, config, weights, noted, **options)


def load_eagle(folder: str | Path) -> EagleHead:
    """Read a head; tensor names may have the prefix `model.`.

    Raises CheckpointError if the folder is not in this layout, if a file is damaged, if any tensor is missing, unknown
    or of the wrong shape, or if a flag is not supported.
    """
    folder = Path(folder)
    written = read_config(folder)
    tensors = {name.removeprefix("model."): value for name, value in read_weights(folder).items()}
    tensors = without_copy(written, tensors)
    config = _from_json(folder, written, tensors)
    with reading(folder / "config.json"):
        head = EagleHead(config)
        make_quantized(head, config.quantization, tensors)
    fill(folder, head, tensors)
    return head


def _from_json(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> EagleConfig:
    file = folder / "config.json"
    warn_of_unknown(file, config)
    refuse(file, {**config, "tie_word_embeddings": False})  # there is no output projection to tie
    with reading(file):
        flags = {name: config[name] for name in ("bias", "eagle_fc_bias") if config.get(name) is not None}
        if len({bool(flag) for flag in flags.values()}) > 1:
            raise CheckpointError(f"{file} sets bias and eagle_fc_bias to different values; keep one of them")
        return EagleConfig(
            **layer_fields(config),
            bias=bool(next(iter(flags.values()), "fc.bias" in tensors)),
            qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
            own_embedding="embed_tokens.weight" in tensors,
            quantization=read_quantization(config),
        )


def holds_eagle(config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> bool:
    """Return whether files are in this layout: a projection, and a layer as wide as the head."""
    if config.get("speculators_model_type") is not None:
        return False
    names = {name.removeprefix("model.") for name in tensors}
    return "fc.weight" in names and layer_width(config, tensors, "layers.0") == config.get("hidden_size", 0)
