"""Draft heads: one module or folder per kind, with the network and its file layouts. `kinds.py` is the registry.

The kind of a head is detected from the contents of its folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from eagle_mlx import hub
from eagle_mlx.errors import CheckpointError, HeadError, loading
from eagle_mlx.formats.fields import read_config
from eagle_mlx.formats.tensors import read_tensors
from eagle_mlx.heads import block, eagle, eagle3, mtp
from eagle_mlx.heads.base import DraftHead, HeadBase
from eagle_mlx.heads.kinds import KINDS, Format, HeadKind, kind_of
from eagle_mlx.target import Target

# Kinds that name themselves come before those that are recognized by their tensors.
_ALL = (mtp.KIND, block.DFLASH, block.DFLASH2, block.DSPARK, eagle3.PEAGLE, eagle3.KIND, eagle.KIND)
KINDS.update({kind.name: kind for kind in _ALL})

__all__ = ["KINDS", "DraftHead", "Format", "HeadBase", "HeadKind", "check_fit", "kind_of", "layout_of", "load_head"]


def load_head(name: str | Path, target: Target | None = None) -> DraftHead:
    """Load a head from a folder or hub id; with a target, check that it fits (`head_check.load_head` also tries it).

    Raises CheckpointError if files cannot be read, HeadError if the head is for another target.
    """
    folder = hub.resolve(name)
    with loading(f"{folder} as a head", CheckpointError):
        layout = layout_of(folder, read_config(folder), read_tensors(folder))[1]
        head: DraftHead = layout.load(folder, None if target is None else target.num_layers)
    if target is not None:
        check_fit(head, target)
        head.attach(target)
    return head


def layout_of(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> tuple[HeadKind, Format]:
    """Return the kind and layout of a head by config and tensors. Raises CheckpointError if they are unknown."""
    if "medusa_num_heads" in config:
        raise CheckpointError(f"{folder} has Medusa heads, which cannot be loaded; EAGLE, MTP and block heads can")
    _refuse_by_name(folder, config)
    for kind in KINDS.values():
        for layout in kind.formats:
            of_blocks = issubclass(kind.head_class, block.BlockHead)
            if layout.holds(config, tensors) and (of_blocks or "dflash_config" not in config):
                return kind, layout
    if "dflash_config" in config:
        raise CheckpointError(
            f"{folder} holds a block drafter of class {config.get('architectures')}; only DFlash, DFlash2 and DSpark "
            "can be loaded"
        )
    if mtp.published.is_source(tensors):
        raise CheckpointError(
            f"{folder} holds a whole model or its MTP layers as they were published; take the head out of it first: "
            f"eagle-convert mtp --source {folder}"
        )
    names = {name.removeprefix("model.") for name in tensors}
    if any(name.startswith("layers.0.") for name in names):
        raise CheckpointError(
            f"{folder} has a language model and not a head; to draft with a model, give it as the draft model"
        )
    raise CheckpointError(
        f"{folder} has no known head: neither EAGLE's layers nor MTP's; its first tensors are "
        f"{', '.join(sorted(names)[:3])}"
    )


def _refuse_by_name(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for heads whose tensors may look like those of another kind."""
    classes = config.get("architectures")
    names = [*(classes if isinstance(classes, list) else [classes]), config.get("speculators_model_type")]
    if "efficient_lm_head_config" in config or any("eagle4" in str(name).lower() for name in names):
        raise CheckpointError(f"{folder} has a head of EAGLE-4, and EAGLE-4 is not supported; EAGLE-1 to 3 heads are")
    model_type = str(config.get("model_type", ""))
    if model_type.startswith("gemma4") and model_type.endswith("_assistant"):
        raise CheckpointError(
            f"{folder} has an assistant (model_type {model_type}), which reads the target's keys and values; heads "
            "that read hidden states can be loaded"
        )
    if model_type.endswith("_assistant"):
        raise CheckpointError(
            f"{folder} has an assistant (model_type {model_type}), whose file layout is not supported; for the same "
            "target, DFlash and DSpark heads can be loaded"
        )


def check_fit(head: DraftHead, target: Target) -> None:
    """Raise HeadError if the head does not fit the target."""
    layers, width = head.named_layers, target.hidden_size
    sizes = (
        ("hidden size", head.target_hidden_size, width),
        ("embedding width", width if head.config.own_embedding else head.hidden_size, width),
        ("vocabulary", head.vocab_size, target.vocab_size),
    )
    wrong = [f"expects a target of {what} {ours} but the target has {its}" for what, ours, its in sizes if ours != its]
    if layers and (max(layers) >= target.num_layers or min(layers) < 0):
        wrong.append(f"reads layers {layers} but the target has {target.num_layers} layers")
    if wrong:
        raise HeadError(f"head {wrong[0]}; was it trained for another model?")
