"""The heads that were trained, extracted or fetched on this machine, and their targets."""

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
"""The least τ of a head that is offered. Even a step of the small included head takes 0.09 of a target step
(checkpoints/README.md), so with a smaller τ a head costs more time than it saves."""
_FEW = 4
"""The weight, in prompts, of a prior with τ 1: the gain measured on three prompts can be wrong by half. `head_check`
uses this many prompts."""


@dataclass(frozen=True)
class HeadRecord:
    """One head, which stays in its own folder. A record without its head is skipped."""

    head: str  # its folder, or its hub id if it was fetched
    names: tuple[str, ...]  # names of its target, the most certain first
    how: How
    fingerprint: str = ""  # the target's fingerprint if the target was in memory (`eagle_mlx.target.fingerprint`)
    acceptance_length: float | None = None  # τ on held-out prompts, if it was measured
    prompts: int | None = None  # the number of prompts that τ was measured on; None if unknown, which counts as few
    made_at: float = field(default_factory=time.time)  # seconds since 1970

    @property
    def here(self) -> bool:
        """Whether the head can be loaded without network access."""
        if self.how == "fetched" and hub.full_id(self.head):
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
    """Record a head (a folder or hub id) for its target. Return whether that worked; a full disk is not an error.

    acceptance_length, prompts: the measured τ and the number of prompts; with 0 prompts there is no τ.
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
    """Return all heads that still exist, the newest first."""
    found = []
    try:
        files = list(_folder().iterdir())
    except OSError:  # nothing was recorded yet, or this user may not read it
        files = []
    for file in files:
        with suppress(OSError, ValueError, TypeError, KeyError):  # another version, or damaged
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
    """Return measured heads by `worth`, then the others, the newest first.

    A τ holds only for the weights that it was measured with: heads of other weights than `fingerprint` come after.
    """

    def place(one: HeadRecord) -> tuple[bool, bool, float, float]:
        if one.worth is None:
            return True, not fingerprint or one.fingerprint != fingerprint, 0.0, -one.made_at
        other = bool(fingerprint and one.fingerprint and one.fingerprint != fingerprint)
        return False, other, -one.worth, -one.made_at

    return sorted(heads, key=place)


def _folder() -> Path:
    return cache_folder() / "heads"
