"""Multi-token-prediction heads: a decoder layer of the target's kind over the next embedding and a hidden state.

Sources: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2; the published models of GLM-4.5, MiMo,
Qwen3-Next and Qwen3.5; vllm-project/speculators. The layer is mlx-lm's for the architecture.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.errors import ConfigError, check
from eagle_mlx.formats.fields import Quantization, check_quantization
from eagle_mlx.formats.tensors import Tensors
from eagle_mlx.heads.base import HeadBase, Mask, layer_mask


@dataclass(frozen=True)
class _Kind:
    """The place of an architecture's decoder layer in mlx-lm."""

    layer: str
    args: str = "ModelArgs"
    index: Callable[[Any], int] | None = None
    """Returns the index of the model layer like the head's, if mlx-lm needs it; None if all layers are alike."""
    mask_arrays: bool = False  # whether its attention takes masks only as arrays


LAYERS = {
    "deepseek_v3": _Kind("DeepseekV3DecoderLayer", index=lambda args: args.num_hidden_layers, mask_arrays=True),
    "glm4_moe": _Kind("DecoderLayer", index=lambda args: args.num_hidden_layers),
    "llama": _Kind("TransformerBlock"),
    "mimo": _Kind("TransformerBlock"),
    "qwen2": _Kind("TransformerBlock"),
    "qwen3": _Kind("TransformerBlock"),
    "qwen3_moe": _Kind("Qwen3MoeDecoderLayer", index=lambda args: args.num_hidden_layers - 1),
    "qwen3_next": _Kind("Qwen3NextDecoderLayer", index=lambda args: args.full_attention_interval - 1),
    "qwen3_5": _Kind("DecoderLayer", "TextModelArgs", index=lambda args: args.full_attention_interval - 1),
}


@dataclass(frozen=True)
class MTPConfig:
    model_type: str  # mlx-lm's name of the layer's architecture
    layer: Mapping[str, Any]  # the architecture's config: the fields of config.json
    hidden_first: bool = False  # in the input of `eh_proj`, the hidden state comes first, then the embedding
    target_norm: bool = True  # read the target's hidden state after its final norm instead of before it
    norm_output: bool = False  # feed the next draft step the output after the head's norm instead of before it
    own_embedding: bool = False
    own_lm_head: bool = False
    quantization: Quantization | None = None  # None if no layer is quantized

    def __post_init__(self) -> None:
        kinds, kind = ", ".join(sorted(LAYERS)), self.model_type
        check(kind in LAYERS, f"MTP layers of model_type {kind} are not supported, only those of {kinds}")
        for name in ("hidden_size", "vocab_size", "rms_norm_eps"):
            value, types = self.layer.get(name), (int, float) if name == "rms_norm_eps" else int
            check(value, f"the layer's config lacks {name}")
            check(isinstance(value, types) and value > 0, f"the layer's config sets {name} to {value!r}")
        check_quantization(self.quantization)

    @property
    def hidden_size(self) -> int:
        return int(self.layer["hidden_size"])

    @property
    def vocab_size(self) -> int:
        return int(self.layer["vocab_size"])


def layer_args(model_type: str, layer: Mapping[str, Any]) -> Any:
    """Return mlx-lm's arguments for an architecture. Raises ConfigError if mlx-lm cannot use the config."""
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    with _usable(model_type):
        return getattr(module, LAYERS[model_type].args).from_dict({**_flat_rope(layer), **layer})


@contextmanager
def _usable(model_type: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, KeyError, ValueError, AttributeError, AssertionError, ArithmeticError, IndexError) as e:
        reason = str(e) or "something is missing"
        raise ConfigError(f"mlx-lm cannot use the config of this {model_type}: {reason}") from e


def _flat_rope(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `rope_parameters` of newer configs as the fields of older ones."""
    rope = dict(layer.get("rope_parameters") or {})
    flat = {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    if rope.get("rope_type", "default") != "default":
        flat["rope_scaling"] = rope
    return flat


def decoder_block(config: MTPConfig) -> nn.Module:
    """Return the architecture's own decoder layer, with full attention."""
    kind, args = LAYERS[config.model_type], layer_args(config.model_type, config.layer)
    make = getattr(importlib.import_module(f"mlx_lm.models.{config.model_type}"), kind.layer)
    with _usable(config.model_type):
        block: nn.Module = make(args) if kind.index is None else make(args, kind.index(args))
    return block


def read_layer(model_type: str, layer: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """Convert a layer's published tensors to the names and shapes of mlx-lm's layer. Unknown names are kept.

    8-bit floats, latent projections and experts are converted too, by `sanitize` of mlx-lm's model with one layer.
    """
    args = layer_args(model_type, {**layer, "num_hidden_layers": 1})
    model = importlib.import_module(f"mlx_lm.models.{model_type}").Model
    read = model.sanitize(SimpleNamespace(args=args), {f"model.layers.0.{name}": x for name, x in tensors.items()})
    return {name.removeprefix("model.layers.0."): value for name, value in read.items()}


class MTPHead(HeadBase[MTPConfig]):
    """A single layer, used recurrently. Embedding and output projection are the target's unless it has its own."""

    def __init__(self, config: MTPConfig, token_ids: mx.array | None = None):
        super().__init__(config, token_ids)
        size, eps = self.hidden_size, float(config.layer["rms_norm_eps"])
        self.enorm = nn.RMSNorm(size, eps=eps)
        self.hnorm = nn.RMSNorm(size, eps=eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = decoder_block(config)
        self.norm = nn.RMSNorm(size, eps=eps)
        if config.own_lm_head:
            self.lm_head = nn.Linear(size, self.vocab_size, bias=False)

    @property
    def reads_images(self) -> bool:
        """True, as it was trained with its target (as in vLLM's `qwen3_5_mtp.py`), unless it has an own embedding."""
        return not self.config.own_embedding

    def features(self, aux: Sequence[mx.array]) -> mx.array:
        """Target's last layer output [B, L, H] -> the same, with the final norm if configured."""
        return self.target.norm(aux[0]) if self.config.target_norm else aux[0]

    def __call__(self, embeddings: mx.array, g: mx.array, cache: Any | None = None, mask: Mask = None) -> mx.array:
        """Embeddings [B, L, H] of tokens t+1, hidden states g [B, L, H] of positions t -> h [B, L, H]."""
        x = self.eh_proj(self.normed(embeddings, g))
        [kept] = cache or [None]
        mask = layer_mask(kept, x.shape[1], mask, as_array=LAYERS[self.config.model_type].mask_arrays)
        h: mx.array = self.block(x, mask, kept)
        return self.norm(h) if self.config.norm_output else h

    def normed(self, embeddings: mx.array, g: mx.array) -> mx.array:
        """Return the input of `eh_proj`: both [B, L, H] normed and concatenated."""
        parts = [self.enorm(embeddings), self.hnorm(g)]
        if self.config.hidden_first:
            parts.reverse()
        return mx.concatenate(parts, axis=-1)

    def logits(self, h: mx.array) -> mx.array:
        normed = h if self.config.norm_output else self.norm(h)
        return self.lm_head(normed) if self.config.own_lm_head else self.target.logits(normed)
