"""P-EAGLE heads: EAGLE-3 heads that draft all tokens in one forward, with masks after the newest position.

A mask has the embedding of a mask token and, in place of the target's hidden states, a vector that was trained. It
attends to the text and to the masks before it. Layout of vllm-project/speculators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import mlx.core as mx

from eagle_mlx.errors import CheckpointError, ConfigError
from eagle_mlx.formats.fields import read_config, reading
from eagle_mlx.formats.tensors import fill, read_weights, without_copy
from eagle_mlx.heads.eagle3.head import Eagle3Config, Eagle3Head
from eagle_mlx.heads.eagle3.portable import inner_tensors, outer_name, take_draft_vocabulary
from eagle_mlx.heads.eagle3.speculators import read_speculators_config
from eagle_mlx.heads.precision import make_quantized


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    mask_token_id: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(f"mask_token_id {self.mask_token_id} is not in a vocabulary of {self.vocab_size}")
        if self.windows:
            raise ConfigError("a layer slides; P-EAGLE heads with windows are not known")


class PEagleHead(Eagle3Head):
    """`mask_hidden` [1, 1, layers read * Ht] takes the place of the hidden states of masks, before all norms."""

    is_sequential = False

    def __init__(self, config: PEagleConfig, d2t: mx.array | None = None):
        super().__init__(config, d2t)
        self.mask_token_id = config.mask_token_id
        self.mask_hidden = mx.zeros((1, 1, config.target_hidden_size * len(config.aux_layers)))

    def masks(self, rows: int, count: int, cache: Any) -> mx.array:
        """Return the outputs [rows, count, H] of masks after the positions in the cache, whose lengths stay."""
        tokens = mx.full((rows, count), self.mask_token_id, mx.int32)
        g = self.features(list(mx.split(self.mask_hidden, len(self.config.aux_layers), axis=-1)))
        return self(self.embed(tokens), mx.broadcast_to(g, (rows, count, g.shape[-1])), cache)

    def confidence(self, h: mx.array, previous: mx.array | None) -> None:
        """Return None: there is no confidence head."""


def load_peagle(folder: str | Path, target_layers: int | None = None) -> PEagleHead:
    """Read a P-EAGLE head. Arguments and errors as in `load_speculators`; `mask_hidden` must be in the files."""
    folder = Path(folder)
    written = read_config(folder)
    file = folder / "config.json"
    mask = written.pop("mask_token_id", None)
    if mask is None:
        raise CheckpointError(f"{file} lacks mask_token_id")
    tensors = without_copy(written, inner_tensors(folder, read_weights(folder)))
    if "mask_hidden" not in tensors:
        raise CheckpointError(f"{folder} lacks mask_hidden, without which masks would read noise")
    tensors = {name: value for name, value in tensors.items() if not name.startswith("verifier_")}
    plain = read_speculators_config(folder, written, tensors, target_layers)
    d2t = take_draft_vocabulary(folder, tensors, plain.vocab_size, plain.draft_vocab_size)
    with reading(file):
        own = {field.name: getattr(plain, field.name) for field in fields(plain)}
        head = PEagleHead(PEagleConfig(**own, mask_token_id=int(mask)), d2t)
        make_quantized(head, head.config.quantization, tensors)
    fill(folder, head, tensors, outer_name)
    return head


def holds_peagle(config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> bool:
    return config.get("speculators_model_type") == "peagle"
