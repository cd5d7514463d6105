"""Which heads there are for a target, those made here first, and loading one of them."""

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
    """How it drafts, if that is known before it is loaded."""
    why: str = ""
    """Why it is tried before those that follow; empty if there is nothing to say."""

    @property
    def reason(self) -> str:
        """What to print of a head that was chosen: `about`, and why."""
        return f"{self.about}; {self.why}" if self.why else self.about


def find_heads(
    target: str | Path, fingerprint: str | None = None, say: Callable[[str], None] = lambda _: None
) -> list[FoundHead]:
    """Return the heads for a target, by its folder or hub id, in the order in which they are to be tried.

    First come heads with a measured τ that were trained, extracted or fetched here, and the included one, the best
    first. Then come those without a τ, the newest first; then the MTP layers of the model; then published heads,
    those in the hub's cache first. Nothing is fetched. A head whose τ is below `LEAST` is not in the list, and `say` is
    told so.
    """
    names = names_of(target)
    known = records_for(names, fingerprint)
    if is_embedded_target(target):
        known = best_first([*known, _included(names)], fingerprint)
    for record in known:
        if not record.is_offered:
            say(
                f"{record} is not offered: with a τ below {LEAST} it costs more time than it saves; "
                f"--head {record.head} uses it all the same"
            )
    here = _with_reasons([one for one in known if one.is_offered])
    own = [
        FoundHead(str(folder), f"{name}'s own MTP layers", mode="mtp")
        for name, folder in _folders(target, names)
        if has_mtp_layer(folder)
    ]
    published = [
        FoundHead(one.head, str(one), hub.cached(one.head) is not None, one.mode) for one in known_heads_for(names)
    ]
    found = [*here, *own, *sorted(published, key=lambda one: not one.here)]
    once: dict[str, FoundHead] = {}
    for one in found:
        once.setdefault(one.head, one)
    return list(once.values())


def _included(names: tuple[str, ...]) -> HeadRecord:
    """The included head, with the τ that its config notes."""
    folder = embedded("head")
    noted = read_config(folder).get("eagle_mlx") or {}
    tau, prompts = noted.get("acceptance_length"), noted.get("prompts")
    return HeadRecord(str(folder), names, "included", acceptance_length=tau, prompts=prompts, made_at=0.0)


def _with_reasons(records: list[HeadRecord]) -> list[FoundHead]:
    """What is found of records in the order of `best_first`, each with the reason for its place."""
    measured = sum(one.worth is not None for one in records)
    found = []
    for place, one in enumerate(records):
        if len(records) == 1:
            why = ""
        elif one.worth is None:
            why = "it was made last, and none has a τ" if place == 0 else "it has no τ"
        elif measured == 1:
            why = "the only one with a τ"
        else:
            why = f"the best τ of {measured}" if place == 0 else "the next best τ"
        found.append(FoundHead(one.head, str(one), why=why))
    return found


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
        return load_head(folder, target)
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


TABLE = Path(__file__).with_name("known_heads.yaml")
UNKNOWN = "unknown"


@dataclass(frozen=True)
class KnownHead:
    target: str
    """Hub id of the model that it was trained for."""
    head: str
    """Its own hub id."""
    kind: str
    """As `eagle_mlx.heads.KINDS` has it."""
    licence: str
    """As its page names it, or `UNKNOWN`."""
    source: str
    """Address of the page that says so."""
    licence_from: str = ""
    """Address of the page that names the licence."""

    @property
    def mode(self) -> Literal["eagle", "mtp"]:
        """How it drafts, as `--spec-decode` calls it."""
        return KINDS[self.kind].mode

    def __str__(self) -> str:
        return f"{self.head}, {KINDS[self.kind].title} for {self.target}, licence {self.licence}"


@cache
def known_heads() -> tuple[KnownHead, ...]:
    """The table; of several heads for one target the first is the one to take."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    sources = table["sources"]
    rows = ((target, row) for target, rows in table["heads"].items() for row in rows)
    return tuple(KnownHead(target, **{**row, "source": sources[row["source"]]}) for target, row in rows)


def known_heads_for(names: tuple[str, ...]) -> list[KnownHead]:
    """Those for a target that goes by any of these names, in the order of the table."""
    return [known for known in known_heads() if any(same_model(name, known.target) for name in names)]
