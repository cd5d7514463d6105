"""Find the heads for a target, those made here first, and load one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import yaml

from eagle_mlx import hub
from eagle_mlx.catalog import embedded, is_embedded_target
from eagle_mlx.catalog.base_model import names_of, same_model
from eagle_mlx.catalog.head_registry import LEAST, HeadRecord, best_first, records_for
from eagle_mlx.formats.fields import read_config
from eagle_mlx.heads import KINDS, load_head
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.load import check_fit
from eagle_mlx.heads.mtp.published import has_mtp_layer, mtp_of_model, published_with_mtp
from eagle_mlx.target import Target

_CONFIG, _BEST = "config.json", "best"
"""The file in a head's folder, and the subfolder in which eagle-train keeps its best head."""


@dataclass(frozen=True)
class FoundHead:
    head: str  # a folder or hub id for `load_found`
    about: str  # one line on what it is and for which model
    here: bool = True  # whether it is on this machine already
    mode: Literal["eagle", "mtp"] | None = None  # how it drafts, if that is known before it is loaded


def find_heads(
    target: str | Path, fingerprint: str | None = None, say: Callable[[str], None] = lambda _: None
) -> list[FoundHead]:
    """Return the heads for a target, a folder or hub id, in the order in which to try them. Fetches nothing.

    First come heads on this machine with a τ, the best first, then those without, the newest first; the model's own MTP
    layers; and published heads by `PREFERRED` kind, cached ones first. Those with a τ below `LEAST` only go to `say`.
    """
    names = names_of(target)
    known = records_for(names, fingerprint)
    if is_embedded_target(target):
        known = best_first([*known, _included(names)], fingerprint)
    for record in known:
        if not record.is_offered:
            say(
                f"{record} is not offered: with a τ below {LEAST} it costs more time than it saves; "
                f"use --head {record.head} to use it anyway"
            )
    here = [FoundHead(one.head, str(one)) for one in known if one.is_offered]
    own = [
        FoundHead(str(folder), f"{name}'s own MTP layers", mode="mtp")
        for name, folder in _folders(target, names)
        if has_mtp_layer(folder)
    ]
    found = [*here, *own, *_published(names)]
    first = {one.head: one for one in reversed(found)}
    return [one for one in found if first[one.head] is one]


def _published(names: tuple[str, ...]) -> list[FoundHead]:
    """Return the published heads, those in the hub's cache first. If the kind decided, the preferred head says so."""
    known = known_heads_for(names)
    first, *others = dict.fromkeys(KINDS[one.kind].title for one in known) or ("",)
    why = f" ({first} before {', '.join(others)} by published τ for the cost of a draft)" if others else ""
    found = [
        FoundHead(one.head, f"{one}{why if one is known[0] else ''}", hub.cached(one.head) is not None, one.mode)
        for one in known
    ]
    return sorted(found, key=lambda one: not one.here)


def _included(names: tuple[str, ...]) -> HeadRecord:
    folder = embedded("head")
    noted = read_config(folder).get("eagle_mlx") or {}
    tau, prompts = noted.get("acceptance_length"), noted.get("prompts")
    return HeadRecord(str(folder), names, "included", acceptance_length=tau, prompts=prompts, made_at=0.0)


def where_mtp_layers_are(target: str | Path) -> str | None:
    """Return the command that fetches the MTP layers that a conversion left out; None if there are none."""
    names = names_of(target)
    for _, folder in _folders(target, names):
        if published_with_mtp(read_config(folder)) and not has_mtp_layer(folder):
            original = next((name for name in reversed(names) if hub.full_id(name)), None)
            return f"eagle-convert mtp --source {original} --bits 4" if original and len(names) > 1 else None
    return None


def load_found(name: str | Path, target: Target) -> DraftHead:
    """Load a head for its target from a folder, a hub id, the output of eagle-train, or a whole model with MTP layers.

    Raises CheckpointError if files cannot be read, HeadError if the head is for another target.
    """
    folder = hub.resolve(name)
    if not (folder / _CONFIG).is_file() and (folder / _BEST / _CONFIG).is_file():
        folder /= _BEST
    if not has_mtp_layer(folder):
        return load_head(folder, target)
    head, _ = mtp_of_model(folder)
    check_fit(head, target)
    head.attach(target)
    return head


def _folders(target: str | Path, names: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Return the model's folders on this machine, each with the name that it was found by."""
    place = Path(target).expanduser()
    found = [(name, place if name == names[0] and place.is_dir() else hub.cached(name)) for name in names]
    return [(name, folder) for name, folder in found if folder is not None and (folder / _CONFIG).is_file()]


TABLE = Path(__file__).with_name("known_heads.yaml")
PREFERRED = ("dspark", "dflash2", "dflash", "peagle", "eagle3", "mtp", "eagle")
"""Kinds of published heads by τ for the cost of a draft, the best first.

DeepSpec's paper (arXiv 2607.05147) trained three alike; for Qwen3-8B on MT-bench with chains of 7, τ is 3.72 for
DSpark, 3.11 for DFlash and 2.66 for EAGLE-3. P-EAGLE (arXiv 2602.01469) is EAGLE-3 whose draft costs one forward.
"""


@dataclass(frozen=True)
class KnownHead:
    target: str  # the hub id of the model that it was trained for
    head: str  # the head's hub id
    kind: str  # the key in `eagle_mlx.heads.KINDS`
    license: str  # the license named on its page, or "unknown"
    source: str  # URL of the page that describes the head

    @property
    def mode(self) -> Literal["eagle", "mtp"]:
        """How it drafts, in the terms of `--spec-decode`."""
        return KINDS[self.kind].mode

    def __str__(self) -> str:
        return f"{self.head}, {KINDS[self.kind].title} for {self.target}, license {self.license}"


@cache
def known_heads() -> tuple[KnownHead, ...]:
    """Return the table of published heads, in its order."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    sources = table["sources"]
    return tuple(
        KnownHead(target, row["head"], row["kind"], row["license"], sources[row["source"]].format(head=row["head"]))
        for target, rows in table["heads"].items()
        for row in rows
    )


def known_heads_for(names: tuple[str, ...]) -> list[KnownHead]:
    """Return the published heads for a target with any of these names, by preferred kind, then in the table's order."""
    found = [known for known in known_heads() if any(same_model(name, known.target) for name in names)]
    return sorted(found, key=lambda known: PREFERRED.index(known.kind))
