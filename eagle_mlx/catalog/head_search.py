"""The heads for a target: those made or fetched on this machine, its own MTP layers, and published ones."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from eagle_mlx import hub
from eagle_mlx.catalog import embedded, is_embedded_target
from eagle_mlx.catalog.base_model import BASE_MODEL, names_of, same_model
from eagle_mlx.errors import ConfigError
from eagle_mlx.files import cache_folder, write_whole
from eagle_mlx.formats.fields import read_config
from eagle_mlx.formats.mtp_layers import has_mtp_layer, published_with_mtp

if TYPE_CHECKING:
    from eagle_mlx.heads import DraftHead
    from eagle_mlx.target import Target

Origin = Literal["trained", "extracted", "fetched", "included"]
LEAST = 1.05
"""The least τ of a head that is offered. Even a step of the small included head takes 0.09 of a target step
(checkpoints/README.md), so with a smaller τ a head costs more time than it saves."""
_FEW = 4  # the weight, in prompts, of a prior with τ 1: the gain measured on three prompts can be wrong by half
_INCLUDED = ("head", "smollm2-135m-instruct")
"""The heads in `checkpoints`. The first is for the target there; the config of others names a base model."""
_CONFIG = "config.json"
PREFERRED = {
    "dspark": "DSpark",
    "dflash2": "DFlash2",
    "dflash": "DFlash",
    "peagle": "P-EAGLE",
    "eagle3": "EAGLE-3",
    "mtp": "MTP",
    "eagle": "EAGLE-1",
}
"""Kinds of published heads with their titles, by τ for the cost of a draft, the best first.

DeepSpec's paper (arXiv 2607.05147) trained three alike; for Qwen3-8B on MT-bench with chains of 7, τ is 3.72 for
DSpark, 3.11 for DFlash and 2.66 for EAGLE-3. P-EAGLE (arXiv 2602.01469) is EAGLE-3 whose draft costs one forward.
"""
PERMITTING = frozenset({"apache-2.0", "mit"})
"""Licenses of known heads that permit any use, so that a head may be fetched although the user has not named it."""


@dataclass(frozen=True)
class HeadRecord:
    """One head, which stays in its own folder. A record without its head is skipped."""

    head: str  # its folder, or its hub id if it was fetched
    names: tuple[str, ...]  # names of its target, the most certain first
    origin: Origin
    fingerprint: str = ""  # the target's fingerprint if the target was in memory (`eagle_mlx.target.fingerprint`)
    acceptance_length: float | None = None  # τ on held-out prompts, if it was measured
    prompts: int | None = None  # the number of prompts that τ was measured on; None if unknown, which counts as few
    made_at: float = field(default_factory=time.time)  # seconds since 1970

    @property
    def here(self) -> bool:
        """Whether the head can be loaded without network access."""
        if self.origin == "fetched" and hub.full_id(self.head):
            return hub.cached(self.head) is not None
        return (Path(self.head) / "config.json").is_file()

    @property
    def worth(self) -> float | None:
        """τ shrunk toward 1, more strongly if it was measured on fewer prompts; None if it was not measured."""
        if self.acceptance_length is None:
            return None
        prompts = _FEW if self.prompts is None else self.prompts
        return 1 + (self.acceptance_length - 1) * prompts / (prompts + _FEW)

    @property
    def is_offered(self) -> bool:
        """Whether commands may choose the head if the user names none."""
        return self.acceptance_length is None or self.acceptance_length >= LEAST

    def __str__(self) -> str:
        on = "" if self.prompts is None else f" on {self.prompts} prompt{'' if self.prompts == 1 else 's'}"
        measured = "" if self.acceptance_length is None else f" (τ {self.acceptance_length:.2f}{on})"
        target = f" for {self.names[0]}" if self.names else ""
        what = "the included head" if self.origin == "included" else f"{self.head}, {self.origin} here"
        return f"{what}{target}{measured}"


def register(
    head: str | Path,
    target: str | Path,
    origin: Origin,
    fingerprint: str = "",
    acceptance_length: float | None = None,
    prompts: int | None = None,
) -> bool:
    """Record a head (a folder or hub id) for its target. Return whether that worked; a full disk is not an error.

    acceptance_length, prompts: the measured τ and the number of prompts; with 0 prompts there is no τ.
    """
    name = str(Path(head).absolute() if Path(head).is_dir() else head)
    tau = None if prompts == 0 else acceptance_length
    record = HeadRecord(name, names_of(target), origin, fingerprint, tau, prompts)
    file = cache_folder() / "heads" / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(asdict(record), indent=2).encode())
    except OSError:
        return False
    return True


def records() -> list[HeadRecord]:
    """Return all heads that still exist, the newest first."""
    heads = []
    for file in (cache_folder() / "heads").glob("*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):  # another version, or damaged
            values = json.loads(file.read_text(encoding="utf-8"))
            names, made_at = tuple(map(str, values["names"])), float(values["made_at"])
            head = HeadRecord(**{**values, "names": names, "made_at": made_at})
            if head.here and math.isfinite(head.worth or 0.0):  # NaN would spoil the order
                heads.append(head)
    return sorted(heads, key=lambda head: -head.made_at)


def records_for(names: tuple[str, ...], fingerprint: str | None = None) -> list[HeadRecord]:
    return [head for head in records() if (fingerprint and head.fingerprint == fingerprint) or _is_for(head, names)]


def _is_for(head: HeadRecord, names: tuple[str, ...]) -> bool:
    return any(same_model(name, other) for name in names for other in head.names)


@dataclass(frozen=True)
class FoundHead:
    head: str  # a folder or hub id for `load_found`
    about: str  # one line on what it is and for which model
    here: bool = True  # whether it is on this machine already
    mode: Literal["eagle", "mtp"] | None = None  # how it drafts, if that is known before it is loaded
    only_by_name: bool = False  # its license is not known to permit any use


def find_heads(
    target: str | Path, fingerprint: str | None = None, say: Callable[[str], None] = lambda _: None
) -> list[FoundHead]:
    """Return the heads for a target, a folder or hub id, in the order in which to try them. Fetches nothing.

    First come heads on this machine: those with a τ, the best first, of other weights last; then the others, the newest
    first. Then the model's own MTP layers, and published heads by `PREFERRED` kind, cached ones first. Heads with a τ
    below `LEAST` only go to `say`.
    """
    names = names_of(target)
    shipped = [head for head in included() if (_is_for(head, names) if head.names else is_embedded_target(target))]

    def place(head: HeadRecord) -> tuple[bool, bool, float, float]:
        # A τ holds only for the weights that it was measured with.
        is_other = bool(fingerprint and head.fingerprint and head.fingerprint != fingerprint)
        return head.worth is None, is_other, -(head.worth or 0.0), -head.made_at

    local = sorted([*records_for(names, fingerprint), *shipped], key=place)
    for head in local:
        if not head.is_offered:
            say(
                f"{head} is not offered: with a τ below {LEAST} it costs more time than it saves; "
                f"use --head {head.head} to use it anyway"
            )
    here = [FoundHead(head.head, str(head)) for head in local if head.is_offered]
    own = [
        FoundHead(str(folder), f"{name}'s own MTP layers", mode="mtp")
        for name, folder in _folders(target, names)
        if has_mtp_layer(folder)
    ]
    choice = known_heads_for(names)
    first, *others = dict.fromkeys(PREFERRED[head.kind] for head in choice) or [""]
    why = f" ({first} before {', '.join(others)} by published τ for the cost of a draft)" if others else ""
    published = [head.found(f"{head}{'' if index else why}") for index, head in enumerate(choice)]
    by_name: dict[str, FoundHead] = {}
    for candidate in [*here, *own, *sorted(published, key=lambda head: not head.here)]:
        by_name.setdefault(candidate.head, candidate)
    return list(by_name.values())


def included() -> list[HeadRecord]:
    """Return the heads in `checkpoints`; none outside a checkout."""
    heads = []
    for name in _INCLUDED:
        with suppress(ConfigError):
            noted = read_config(folder := embedded(name)).get("eagle_mlx") or {}
            names = tuple(filter(None, [noted.get(BASE_MODEL)]))
            tau, prompts = noted.get("acceptance_length"), noted.get("prompts")
            heads.append(HeadRecord(str(folder), names, "included", "", tau, prompts, made_at=0.0))
    return heads


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
    from eagle_mlx.heads import check_fit, load_head
    from eagle_mlx.heads.mtp import mtp_of_model

    folder = hub.head_folder(name)
    if not has_mtp_layer(folder):
        return load_head(folder, target)
    head, _ = mtp_of_model(folder)
    check_fit(head, target, f"head {name}")
    head.attach(target)
    return head


def _folders(target: str | Path, names: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Return the model's folders on this machine, each with the name that it was found by."""
    place = Path(target).expanduser()
    folders = [(name, place if name == names[0] and place.is_dir() else hub.cached(name)) for name in names]
    return [(name, folder) for name, folder in folders if folder is not None and (folder / _CONFIG).is_file()]


@dataclass(frozen=True)
class KnownHead:
    target: str  # the hub id of the model that it was trained for
    head: str  # the head's hub id
    kind: str  # the key in `eagle_mlx.heads.KINDS`
    license: str  # the license named on its page, or "unknown"
    source: str  # URL of the page that describes the head
    size: str = hub.UNKNOWN  # of its weights
    revision: str = hub.UNKNOWN  # the commit that is fetched

    def __str__(self) -> str:
        facts = f"license {self.license}, size {self.size}, revision {self.revision}"
        return f"{self.head}, {PREFERRED[self.kind]} for {self.target}, {facts}"

    def found(self, about: str) -> FoundHead:
        is_here = hub.cached(self.head) is not None
        mode: Literal["eagle", "mtp"] = "mtp" if self.kind == "mtp" else "eagle"
        return FoundHead(self.head, about, is_here, mode, only_by_name=self.license not in PERMITTING)


@cache
def known_heads() -> tuple[KnownHead, ...]:
    names = [fact.name for fact in fields(KnownHead)]
    return tuple(KnownHead(**{name: row[name] for name in names}) for row in hub.recorded_heads().values())


def known_heads_for(names: tuple[str, ...]) -> list[KnownHead]:
    """Return the published heads for a target with any of these names, by preferred kind, then in the table's order."""
    heads = [head for head in known_heads() if any(same_model(name, head.target) for name in names)]
    return sorted(heads, key=lambda head: list(PREFERRED).index(head.kind))
