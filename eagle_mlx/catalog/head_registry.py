"""Which heads were trained, taken out of a model or fetched on this machine, and for which target."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from eagle_mlx import hub
from eagle_mlx.catalog.base_model import names_of, same_model
from eagle_mlx.files import cache_folder, write_whole

How = Literal["trained", "extracted", "fetched", "included"]
LEAST = 1.05
"""Heads with a smaller τ are not offered: one step of even the small included head takes 0.09 of a target step
(checkpoints/README.md), so such a head costs more time than its drafts save."""
_FEW = 4
"""A τ counts as if it had been measured on so many more prompts on which no draft was accepted (τ 1). A τ of three
prompts can be off by half of what it gains, and one of 80 prompts by little. `head_check` tries a head on as few."""


@dataclass(frozen=True)
class HeadRecord:
    """One head. The head itself stays where it is; a record whose head is gone is passed over."""

    head: str
    """Its folder, or its hub id where it was fetched."""
    names: tuple[str, ...]
    """Names of its target, the most certain first."""
    how: How
    fingerprint: str = ""
    """The target's, where it was in memory (`eagle_mlx.target.fingerprint`)."""
    acceptance_length: float | None = None
    """τ on held-out prompts, if it was measured."""
    prompts: int | None = None
    """Prompts that τ was measured on; None if that is not known, which counts as few."""
    made_at: float = field(default_factory=time.time)
    """Seconds since 1970."""

    @property
    def here(self) -> bool:
        """Whether the head can be loaded without asking anybody."""
        if self.how == "fetched" and hub.full_id(self.head):
            return hub.cached(self.head) is not None
        return (Path(self.head) / "config.json").is_file()

    @property
    def worth(self) -> float | None:
        """τ, moved toward 1 the more the fewer prompts it was measured on; None if it was not measured."""
        if self.acceptance_length is None:
            return None
        prompts = _FEW if self.prompts is None else self.prompts
        return 1 + (self.acceptance_length - 1) * prompts / (prompts + _FEW)

    @property
    def is_offered(self) -> bool:
        """Whether commands may choose the head without being asked for it by name."""
        return self.acceptance_length is None or self.acceptance_length >= LEAST

    def __str__(self) -> str:
        on = "" if self.prompts is None else f" on {self.prompts} prompt{'' if self.prompts == 1 else 's'}"
        measured = f" (τ {self.acceptance_length:.2f}{on})" if self.acceptance_length is not None else ""
        what = "the included head" if self.how == "included" else f"{self.head}, {self.how} here for {self.names[0]}"
        return f"{what}{measured}"


def register(
    head: str | Path,
    target: str | Path,
    how: How,
    fingerprint: str = "",
    acceptance_length: float | None = None,
    prompts: int | None = None,
) -> bool:
    """Remember a head, a folder or a hub id, for its target. Return whether it could be: a full disk fails nothing.

    acceptance_length, prompts: its τ and the number of prompts that τ was measured on; with 0 there is no τ.
    """
    acceptance_length = None if prompts == 0 else acceptance_length
    place = Path(head)
    name = str(place.absolute()) if place.is_dir() else str(head)
    record = HeadRecord(name, names_of(target), how, fingerprint, acceptance_length, prompts)
    file = _folder() / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(asdict(record), indent=2).encode())
    except OSError:
        return False
    return True


def records() -> list[HeadRecord]:
    """All heads that are still there, the newest first."""
    found = []
    try:
        files = list(_folder().iterdir())
    except OSError:  # nothing was made here yet, or it is not this user's to read
        files = []
    for file in files:
        with suppress(OSError, ValueError, TypeError, KeyError):  # of another version, or damaged
            values = json.loads(file.read_text(encoding="utf-8"))
            found.append(HeadRecord(**{**values, "names": tuple(values["names"])}))
    return sorted((one for one in found if one.here), key=lambda one: -one.made_at)


def records_for(names: tuple[str, ...], fingerprint: str | None = None) -> list[HeadRecord]:
    """Return the heads for a target, by its fingerprint or its names, in the order of `best_first`."""
    return best_first(
        [
            one
            for one in records()
            if (fingerprint and one.fingerprint == fingerprint)
            or any(same_model(a, b) for a in names for b in one.names)
        ],
        fingerprint,
    )


def best_first(heads: list[HeadRecord], fingerprint: str | None = None) -> list[HeadRecord]:
    """Return measured heads by what their τ is worth, then the others, the newest first.

    A τ holds for the weights that it was measured with, so a head that was measured with other weights than those of
    `fingerprint` comes after the ones that were not. Of heads without a τ, those of the same weights come first.
    """

    def place(one: HeadRecord) -> tuple[bool, bool, float, float]:
        if one.worth is None:
            return True, not fingerprint or one.fingerprint != fingerprint, 0.0, -one.made_at
        other = bool(fingerprint and one.fingerprint and one.fingerprint != fingerprint)
        return False, other, -one.worth, -one.made_at

    return sorted(heads, key=place)


def _folder() -> Path:
    return cache_folder() / "heads"
