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

How = Literal["trained", "extracted", "fetched"]


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
    """τ on held-out prompts, where it was measured."""
    made_at: float = field(default_factory=time.time)
    """Seconds since 1970."""

    @property
    def here(self) -> bool:
        """Whether the head can be loaded without asking anybody."""
        if self.how == "fetched" and hub.full_id(self.head):
            return hub.cached(self.head) is not None
        return (Path(self.head) / "config.json").is_file()

    def __str__(self) -> str:
        measured = f" (τ {self.acceptance_length:.2f})" if self.acceptance_length is not None else ""
        return f"{self.head}, {self.how} here for {self.names[0]}{measured}"


def register(
    head: str | Path,
    target: str | Path,
    how: How,
    fingerprint: str = "",
    acceptance_length: float | None = None,
) -> bool:
    """Remember a head, a folder or a hub id, for its target. Whether it could be: nothing fails for a full disk."""
    place = Path(head)
    name = str(place.absolute()) if place.is_dir() else str(head)
    record = HeadRecord(name, names_of(target), how, fingerprint, acceptance_length)
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
    """Those for a target: of the very same weights first, then of any by that name."""
    every = records()
    exact = [one for one in every if fingerprint and one.fingerprint == fingerprint]
    named = [one for one in every if any(same_model(a, b) for a in names for b in one.names)]
    return [*exact, *(one for one in named if one not in exact)]


def _folder() -> Path:
    return cache_folder() / "heads"
