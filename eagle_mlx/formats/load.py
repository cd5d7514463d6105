"""Loading a head of whatever kind: told by what the folder holds, never by its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from eagle_mlx import hub
from eagle_mlx.errors import CheckpointError, HeadError
from eagle_mlx.formats import mtp
from eagle_mlx.formats.eagle import load_eagle
from eagle_mlx.formats.eagle3 import load_eagle3
from eagle_mlx.formats.fields import read_config
from eagle_mlx.formats.mtp_source import is_source
from eagle_mlx.formats.speculators import load_speculators
from eagle_mlx.formats.tensors import read_tensors
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.target import Target

_OTHERS = {
    "dflash_config": "a DFlash head, which drafts blocks",
    "medusa_num_heads": "Medusa heads",
}
"""Fields that only heads of kinds that are not supported have."""


def load_head(name: str | Path, target: Target | None = None) -> DraftHead:
    """Load a head from a folder or a hub id, and with a target see that it fits (`sanity.load_head` tries it as well).

    Raises CheckpointError for files that cannot be read, HeadError for a head of another target.
    """
    folder = hub.resolve(name)
    head = _load(folder, target.num_layers if target is not None else None)
    if target is not None:
        check_fit(head, target)
        head.attach(target)
    return head


def _load(folder: Path, target_layers: int | None) -> DraftHead:
    config = read_config(folder)
    kind = kind_of(folder, config, read_tensors(folder))
    if kind == "speculators":
        return load_speculators(folder, target_layers)
    if kind == "mtp":
        return mtp.load_mtp(folder)
    return load_eagle(folder) if kind == "eagle" else load_eagle3(folder, target_layers)


def kind_of(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> str:
    """ "eagle3", "speculators", "eagle" or "mtp", from config.json and the tensors' names and shapes.

    Raises CheckpointError that names what was found where it is none of them.
    """
    for field, what in _OTHERS.items():
        if field in config:
            raise CheckpointError(f"{folder} holds {what}; EAGLE and MTP heads are known")
    if config.get("speculators_model_type") is not None:
        return "mtp" if config["speculators_model_type"] == "mtp" else "speculators"
    if mtp.FIELD in config:
        return "mtp"
    if is_source(tensors):
        raise CheckpointError(
            f"{folder} holds a whole model or its MTP layers as they were published; take the head out of it first: "
            f"eagle-convert mtp --source {folder}"
        )
    names = {name.removeprefix("model.") for name in tensors}
    first = next((x for x in ("midlayer", "layers.0") if f"{x}.self_attn.q_proj.weight" in names), None)
    if first is None:
        raise CheckpointError(
            f"{folder} holds no head that is known: neither EAGLE's layers nor MTP's; its tensors begin with "
            f"{', '.join(sorted(names)[:3])}"
        )
    if first == "midlayer" or _width(config, tensors, f"{first}.self_attn.q_proj") != config.get("hidden_size"):
        return "eagle3"
    if "fc.weight" in names:
        return "eagle"
    raise CheckpointError(f"{folder} holds a language model, no head; a model that drafts is given as a draft model")


def _width(config: Mapping[str, Any], tensors: Mapping[str, mx.array], layer: str) -> int:
    """How many numbers a layer reads: one for each column of its weight, unless that is packed."""
    found = {name.removeprefix("model."): value for name, value in tensors.items()}
    how = config.get("quantization")
    if f"{layer}.scales" in found and isinstance(how, dict) and isinstance(how.get("group_size"), int):
        return int(found[f"{layer}.scales"].shape[-1] * how["group_size"])
    return int(found[f"{layer}.weight"].shape[-1])


def check_fit(head: DraftHead, target: Target) -> None:
    """Raise HeadError where the head cannot belong to the target."""
    embedding = head.embedding_size
    for what, trained, actual in (
        ("hidden size", head.target_hidden_size, target.hidden_size),
        ("embedding width", target.hidden_size if embedding is None else embedding, target.hidden_size),
        ("vocabulary", head.vocab_size, target.vocab_size),
    ):
        if trained != actual:
            raise HeadError(
                f"head expects a target of {what} {trained} but the target has {actual}; "
                "was it trained for another model?"
            )
    layers = named_layers(head)
    if layers and (max(layers) >= target.num_layers or min(layers) < 0):
        raise HeadError(
            f"head reads layers {layers} but the target has {target.num_layers} layers; "
            "was it trained for another model?"
        )


def named_layers(head: DraftHead) -> tuple[int, ...]:
    """The target layers that a head names itself; none for one that reads the last layer, whichever that is."""
    named: tuple[int, ...] = getattr(getattr(head, "config", None), "aux_layers", ())
    return named
