"""Which heads there are for a target, those made here first, and loading one of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eagle_mlx import formats, hub
from eagle_mlx.catalog.base_model import names_of
from eagle_mlx.catalog.embedded import embedded, is_embedded_target
from eagle_mlx.catalog.head_registry import records_for
from eagle_mlx.catalog.known_heads import known_heads_for
from eagle_mlx.formats.fields import read_config
from eagle_mlx.formats.fit import check_fit
from eagle_mlx.formats.mtp_source import has_mtp_layer, mtp_of_model, published_with_mtp
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.target import Target

_CONFIG, _BEST = "config.json", "best"
"""What a head's folder holds, and where eagle-train puts the head that it keeps."""


@dataclass(frozen=True)
class FoundHead:
    head: str
    """What `load_found` takes: a folder, or a hub id."""
    about: str
    """One line on what it is and whose."""
    here: bool = True
    """Whether nothing has to be fetched."""
    mode: Literal["eagle", "mtp"] | None = None
    """How it drafts, where that is known before it is loaded."""


def find_heads(target: str | Path, fingerprint: str | None = None) -> list[FoundHead]:
    """The heads for a target, by its folder or hub id, in the order in which they are to be tried.

    First those that were trained, extracted or fetched here, and the included one; then MTP layers in the model's own
    files; then published ones, of which those that were fetched before come first. Nothing is fetched.
    """
    names = names_of(target)
    here = [FoundHead(one.head, str(one)) for one in records_for(names, fingerprint)]
    included = [FoundHead(str(embedded("head")), "the included head")] if is_embedded_target(target) else []
    own = [
        FoundHead(str(folder), f"{name}'s own MTP layers", mode="mtp")
        for name, folder in _folders(target, names)
        if has_mtp_layer(folder)
    ]
    published = [
        FoundHead(one.head, str(one), hub.cached(one.head) is not None, one.mode) for one in known_heads_for(names)
    ]
    found = [*here, *included, *own, *sorted(published, key=lambda one: not one.here)]
    once: dict[str, FoundHead] = {}
    for one in found:
        once.setdefault(one.head, one)
    return list(once.values())


def where_mtp_layers_are(target: str | Path) -> str | None:
    """The command that fetches the MTP layers which a conversion has left out; None where there are none to be had."""
    names = names_of(target)
    for _, folder in _folders(target, names):
        if published_with_mtp(read_config(folder)) and not has_mtp_layer(folder):
            original = next((name for name in reversed(names) if hub.full_id(name)), None)
            return f"eagle-convert mtp --source {original} --bits 4" if original and len(names) > 1 else None
    return None


def load_found(name: str | Path, target: Target) -> DraftHead:
    """Load a head for its target: a folder or a hub id, the output of eagle-train, or a whole model's MTP layer.

    Raises CheckpointError for files that cannot be read, HeadError for a head of another target.
    """
    folder = hub.resolve(name)
    if not (folder / _CONFIG).is_file() and (folder / _BEST / _CONFIG).is_file():
        folder /= _BEST
    if not has_mtp_layer(folder):
        return formats.load_head(folder, target)
    head, _ = mtp_of_model(folder)
    check_fit(head, target)
    head.attach(target)
    return head


def _folders(target: str | Path, names: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Where files of the model lie on this machine, under each of its names."""
    place = Path(target).expanduser()
    if place.is_dir():
        found: list[tuple[str, Path | None]] = [(names[0], place)]
    else:
        found = [(names[0], hub.cached(names[0]))]
    found += [(name, hub.cached(name)) for name in names[1:]]
    return [(name, folder) for name, folder in found if folder is not None and (folder / _CONFIG).is_file()]
