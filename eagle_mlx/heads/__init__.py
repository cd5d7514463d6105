"""Draft heads: one module or folder per kind, with the network and its file layouts. `KINDS` lists them.

The kind of a head is detected from the contents of its folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_mlx import hub
from eagle_mlx.errors import CheckpointError, ConfigError, HeadError, loading
from eagle_mlx.formats.mtp_layers import is_source
from eagle_mlx.formats.tensors import HeadFolder, check_floating
from eagle_mlx.heads import block, eagle, eagle3, mtp
from eagle_mlx.heads.base import DRAFT_WINDOW, DraftHead, Format, HeadBase, HeadKind
from eagle_mlx.target import Target

# Kinds that name themselves come before those that are recognized by their tensors.
_ALL = (mtp.KIND, block.DFLASH, block.DFLASH2, block.DSPARK, eagle3.PEAGLE, eagle3.KIND, eagle.KIND)
KINDS: dict[str, HeadKind] = {kind.name: kind for kind in _ALL}
"""The kinds by name. If several layouts match a folder, the first one is used."""

__all__ = ["KINDS", "DraftHead", "Format", "HeadBase", "HeadKind", "check_fit", "kind_of", "layout_of", "load_head"]


def kind_of(head: DraftHead) -> HeadKind:
    """Return the kind of a head. Raises ConfigError if it is unknown."""
    for kind in KINDS.values():
        if isinstance(head, kind.head_class):
            return kind
    raise ConfigError(f"a {type(head).__name__} is of no known kind; the kinds are {', '.join(KINDS)}")


def load_head(name: str | Path, target: Target | None = None) -> DraftHead:
    """Load a head from a folder or hub id; with a target, check that it fits (`head_check.load_head` also tries it).

    Of the output of eagle-train, the best head is loaded. Raises CheckpointError if files cannot be read, HeadError if
    the head is for another target.
    """
    folder = hub.head_folder(name)
    with loading(f"{folder} as a head", CheckpointError):
        files = HeadFolder.read(folder, *(() if target is None else (target.num_layers, target.vocab_size)))
        layout = layout_of(files)[1]
        check_floating(folder, files.tensors)
        head: DraftHead = layout.load(files)
    head.draft_window = _draft_window(files)
    if target is not None:
        check_fit(head, target, f"head {name}")
        head.attach(target)
    return head


def _draft_window(files: HeadFolder) -> int | None:
    """Return the window that a head was trained with. Raises CheckpointError if it is not a size."""
    size = (files.config.get("eagle_mlx") or {}).get(DRAFT_WINDOW)
    if size is not None and (type(size) is not int or size < 1):
        raise CheckpointError(f"{files.file} sets eagle_mlx.{DRAFT_WINDOW} to {size!r}; it must be a number above 0")
    return size


def layout_of(files: HeadFolder) -> tuple[HeadKind, Format]:
    """Return the kind and layout of a head. Raises CheckpointError if they are unknown."""
    folder, config, tensors = files.folder, files.config, files.tensors
    refused = _refusal(config)
    if refused is not None:
        raise CheckpointError(f"{folder} has {refused}")
    in_blocks = "dflash_config" in config
    for kind in KINDS.values():
        for layout in kind.formats:
            if layout.holds(config, tensors) and (not in_blocks or issubclass(kind.head_class, block.BlockHead)):
                return kind, layout
    if in_blocks:
        reason = (
            f"holds a block drafter of class {config.get('architectures')}; only DFlash, DFlash2 and DSpark can be "
            "loaded"
        )
    elif is_source(tensors):
        reason = (
            "holds a whole model or its MTP layers as they were published; take the head out of it first: "
            f"eagle-convert mtp --source {folder}"
        )
    elif any(name.startswith("layers.0.") for name in tensors):
        reason = "has a language model and not a head; to draft with a model, give it as the draft model"
    else:
        first = ", ".join(sorted(tensors)[:3])
        reason = f"has no known head: neither EAGLE's layers nor MTP's; its first tensors are {first}"
    raise CheckpointError(f"{folder} {reason}")


def _refusal(config: Mapping[str, Any]) -> str | None:
    """Return why a head is refused by name: its tensors may look like those of another kind."""
    classes, model_type = config.get("architectures"), str(config.get("model_type", ""))
    names = [*(classes if isinstance(classes, list) else [classes]), config.get("speculators_model_type")]
    if "medusa_num_heads" in config:
        return "Medusa heads, which cannot be loaded; EAGLE, MTP and block heads can"
    if "efficient_lm_head_config" in config or any("eagle4" in str(name).lower() for name in names):
        return "a head of EAGLE-4, and EAGLE-4 is not supported; EAGLE-1 to 3 heads are"
    if not model_type.endswith("_assistant") or model_type == block.MUSE:
        return None
    why = "whose file layout is not supported; for the same target, DFlash and DSpark heads can be loaded"
    if model_type.startswith("gemma4"):
        why = "which reads the target's keys and values; heads that read hidden states can be loaded"
    return f"an assistant (model_type {model_type}), {why}"


def check_fit(head: DraftHead, target: Target, what: str = "head") -> None:
    """Raise HeadError, which names the head as `what`, if it does not fit the target."""
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
        raise HeadError(f"{what} {wrong[0]}; was it trained for another model?")
