"""Load a head of any kind. The kind is detected from the folder's contents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from eagle_mlx import hub
from eagle_mlx.errors import CheckpointError, HeadError
from eagle_mlx.formats.fields import read_config
from eagle_mlx.formats.tensors import read_tensors
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.block import BlockHead
from eagle_mlx.heads.kinds import KINDS, Format, HeadKind
from eagle_mlx.heads.mtp.published import is_source
from eagle_mlx.target import Target


def load_head(name: str | Path, target: Target | None = None) -> DraftHead:
    """Load a head from a folder or hub id; with a target, check that it fits (`head_check.load_head` also tries it).

    Raises CheckpointError if files cannot be read, HeadError if the head is for another target.
    """
    folder = hub.resolve(name)
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
    if str(config.get("model_type", "")).endswith("_assistant"):
        raise CheckpointError(
            f"{folder} has an assistant (model_type {config['model_type']}), which reads the target's keys and values; "
            "heads that read hidden states can be loaded"
        )
    matching = ((kind, layout) for kind in KINDS.values() for layout in kind.formats if layout.holds(config, tensors))
    found = next(matching, None)
    if "dflash_config" in config and (found is None or not issubclass(found[0].head_class, BlockHead)):
        named = config.get("architectures")
        classes = ", ".join(map(str, named)) if isinstance(named, list) and named else "no name"
        raise CheckpointError(
            f"{folder} holds a block drafter of class {classes}, not a DFlash head, DFlash2 head or DSpark head"
        )
    if found is not None:
        return found
    if is_source(tensors):
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


def check_fit(head: DraftHead, target: Target) -> None:
    """Raise HeadError if the head does not fit the target."""
    for what, trained, actual in (
        ("hidden size", head.target_hidden_size, target.hidden_size),
        ("embedding width", target.hidden_size if head.config.own_embedding else head.hidden_size, target.hidden_size),
        ("vocabulary", head.vocab_size, target.vocab_size),
    ):
        if trained != actual:
            raise HeadError(
                f"head expects a target of {what} {trained} but the target has {actual}; "
                "was it trained for another model?"
            )
    layers = head.named_layers
    if layers and (max(layers) >= target.num_layers or min(layers) < 0):
        raise HeadError(
            f"head reads layers {layers} but the target has {target.num_layers} layers; "
            "was it trained for another model?"
        )
