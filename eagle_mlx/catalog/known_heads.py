"""Heads that others have published: for which target, of which kind, under which licence, and where that was read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import yaml

from eagle_mlx.catalog.base_model import same_model

TABLE = Path(__file__).with_suffix(".yaml")
UNKNOWN = "unknown"
_NAMES = {"eagle3": "EAGLE-3", "eagle": "EAGLE-1", "mtp": "MTP"}


@dataclass(frozen=True)
class KnownHead:
    target: str
    """Hub id of the model that it was trained for."""
    head: str
    """Its own hub id."""
    kind: Literal["eagle3", "eagle", "mtp"]
    licence: str
    """As its page names it, or `UNKNOWN`."""
    source: str
    """Address of the page that says so."""
    licence_from: str = ""
    """Address of the page that names the licence."""

    @property
    def mode(self) -> Literal["eagle", "mtp"]:
        """How it drafts, as `--spec-decode` calls it."""
        return "mtp" if self.kind == "mtp" else "eagle"

    def __str__(self) -> str:
        return f"{self.head}, {_NAMES[self.kind]} for {self.target}, licence {self.licence}"


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
