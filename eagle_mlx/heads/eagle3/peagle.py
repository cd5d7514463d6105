"""P-EAGLE in the portable layout: EAGLE-3's tensors with `mask_hidden`, and the id of the mask token in the config.

SpecForge (`PEagleDraftModel`), NeMo AutoModel (`parallel_drafting`) and Amazon (`ptd_token_id`) write it. Sources:
SpecForge's `modeling/draft/peagle.py`; NeMo's `speculative/eagle/peagle_draft.py`; aws-neuron/nkipy, which reads
amazon/GPT-OSS-20B-P-EAGLE; vLLM's `llama_eagle3.py`, which flattens `mask_hidden`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.core as mx

from eagle_mlx.errors import CheckpointError
from eagle_mlx.formats.fields import read_config, reading
from eagle_mlx.heads.base import build
from eagle_mlx.heads.eagle3.head import Eagle3Config, PEagleConfig, PEagleHead
from eagle_mlx.heads.eagle3.portable import PEAGLE, is_portable, outer_name, read_eagle3
from eagle_mlx.heads.kinds import of_class

_MASK_TOKEN = ("mask_token_id", "ptd_token_id", "pard_token")
"""The names of the mask token's id; vLLM reads the last two."""
_TRAINING = ("parallel_drafting", "num_depths", "num_aux_hidden_states")


def holds_peagle(config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> bool:
    """Return whether files are a P-EAGLE head in the portable layout."""
    masked = any(name.removeprefix("model.") == "mask_hidden" for name in tensors)
    named = of_class(PEAGLE)(config, tensors) or bool(config.get("parallel_drafting"))
    return is_portable(config, tensors) and (masked or named)


def load_peagle(folder: str | Path, target_layers: int | None = None) -> PEagleHead:
    """Read a P-EAGLE head. Arguments and errors as in `load_eagle3`."""
    folder = Path(folder)
    written = read_config(folder)
    mask = take_mask_token(folder / "config.json", written)
    rest = {name: value for name, value in written.items() if name not in _TRAINING}
    return build_peagle(folder, *read_eagle3(folder, rest, target_layers), mask)


def take_mask_token(file: Path, config: dict[str, Any]) -> int:
    """Remove the id of the mask token from a config and return it. Raises CheckpointError without a single one."""
    given = {name: config.pop(name) for name in _MASK_TOKEN if config.get(name) is not None}
    with reading(file):
        ids = {int(value) for value in given.values()}
    if len(ids) > 1:
        raise CheckpointError(f"{file} names several mask tokens, {given}; keep the one that the head was trained with")
    if not ids:
        raise CheckpointError(f"{file} lacks mask_token_id; add the id of the token that the head was trained with")
    return ids.pop()


def build_peagle(folder: Path, plain: Eagle3Config, tensors: dict[str, mx.array], mask: int) -> PEagleHead:
    """Return the head for the config of its layers, its tensors, and the id of its mask token."""
    if "mask_hidden" not in tensors:
        raise CheckpointError(f"{folder} lacks mask_hidden, without which mask tokens would read noise")
    with reading(folder / "config.json"):
        own = {field.name: getattr(plain, field.name) for field in fields(plain)}
        config = PEagleConfig(**own, mask_token_id=mask)
    tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    return build(folder, PEagleHead, config, tensors, outer_name)
