"""EAGLE-1 and EAGLE-2: one network, which predicts the target's own last hidden states, and its file layout.

Sources: Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" and "EAGLE-2: Faster
Inference of Language Models with Dynamic Draft Trees"; files as in SafeAILab/EAGLE: `fc`, `layers.*` (the first without
input norm) and `embed_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.errors import CheckpointError
from eagle_mlx.formats import fields
from eagle_mlx.formats.tensors import HeadFolder, SaveOptions, layer_width, save_head, with_embedding
from eagle_mlx.heads.base import Format, HeadBase, HeadKind, Mask, build
from eagle_mlx.heads.layers import LayerShape, PlainLayer, llama_json

ARCHITECTURE = "LlamaForCausalLMEagle"  # SGLang's name; SafeAILab's own loader does not check it


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LayerShape):
    """`hidden_size` is the target's."""

    bias: bool = True  # a bias on `fc`


class EagleHead(HeadBase[EagleConfig]):
    """Features are the target's last hidden states after its final norm; the target computes logits."""

    def __init__(self, config: EagleConfig, token_ids: mx.array | None = None):
        super().__init__(config, token_ids)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = [PlainLayer(config, index, normed=index > 0) for index in range(config.num_hidden_layers)]

    def features(self, aux: Sequence[mx.array]) -> mx.array:
        """Target's last layer output [B, L, H] -> the same after the final norm."""
        return self.target.norm(aux[0])

    def __call__(self, embeddings: mx.array, g: mx.array, cache: Any | None = None, mask: Mask = None) -> mx.array:
        """Embeddings [B, L, H] of tokens t+1, features g [B, L, H] of positions t -> the features of t+1."""
        h: mx.array = self.fc(mx.concatenate([embeddings, g], axis=-1))
        for layer, kept in zip(self.layers, cache or [None] * len(self.layers), strict=True):
            h = layer(h, mask, kept)
        return h

    def logits(self, h: mx.array) -> mx.array:
        return self.target.logits(h)


def save_eagle(head: EagleHead, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    """Write a head (`Format.save`) with an embedding, its own or its target's. Raises HeadError without either."""
    weights, noted = with_embedding(head)
    config = llama_json(head.config, ARCHITECTURE) | {"eagle_fc_bias": head.config.bias}
    del config["qk_norm"]
    save_head(folder, config, weights, noted, **options)


def load_eagle(files: HeadFolder) -> EagleHead:
    written, tensors = files.config, files.without_copy()
    fields.warn_of_unknown(files.file, written)
    fields.refuse(files.file, {**written, "tie_word_embeddings": False})  # there is no output projection to tie
    flags = {bool(written[name]) for name in ("bias", "eagle_fc_bias") if written.get(name) is not None}
    if len(flags) > 1:
        raise CheckpointError(f"{files.file} sets bias and eagle_fc_bias to different values; keep one of them")
    with fields.reading(files.file):
        config = EagleConfig(
            **fields.layer_fields(written),
            bias=flags.pop() if flags else "fc.bias" in tensors,
            qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
            own_embedding="embed_tokens.weight" in tensors,
            quantization=fields.read_quantization(written),
        )
    return build(files.folder, EagleHead, config, tensors)


def _holds(config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> bool:
    """Return whether files are in this layout: a projection, and a layer as wide as the head."""
    is_as_wide = layer_width(config, tensors, "layers.0") == config.get("hidden_size", 0)
    return config.get("speculators_model_type") is None and "fc.weight" in tensors and is_as_wide


_ABOUT, _READERS = "EAGLE-1, as SafeAILab writes it", ("SafeAILab", "SGLang")
_FORMAT = Format("eagle", _ABOUT, _READERS, _holds, load_eagle, save_eagle, has_embedding=True)
KIND = HeadKind("eagle", "EAGLE-1", EagleHead, (_FORMAT,))
