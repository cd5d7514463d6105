"""Parse names of sources: `chats.jsonl`, `user/name:config:split=0.3`, `preset:gsm8k@rows.parquet`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from eagle_mlx.errors import ConfigError, DataError

from . import presets
from .rows import FieldMap

Kind = Literal["builtin", "file", "folder", "hub"]
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")

SPECS = """\
  builtin:python             functions of the running Python's standard library as conversations, some plain files
  builtin:python-chat        the conversations alone
  builtin:python-docstrings  the conversations whose function has a docstring
  builtin:python-files       plain files alone, in pieces
  chats.jsonl, .jsonl.gz, .json, .parquet    a local file
  folder, folder:split, folder:config:split    a data set in a local folder, as the hub would have it
  user/name, user/name:split, user/name:config:split    a data set of the hub; a split may be cut: train[:10%]
  preset:ultrachat           one of the field's usual sets (`eagle-data presets` lists them)
  preset:ultrachat@PLACE     the same from a file, a folder or another id that holds its rows
SOURCE=WEIGHT makes it a part of a mix: a.jsonl=0.7 b.parquet=0.3"""

_WEIGHT = re.compile(r"(?P<name>.+)=(?P<weight>[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?)", re.IGNORECASE)
_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PART = re.compile(r"[\w.-]+(\[[\d%:-]*\])?(\+[\w.-]+(\[[\d%:-]*\])?)*")


@dataclass(frozen=True)
class Source:
    """A source of conversations."""

    spec: str
    """The name as given, without its weight. Error messages and maps use it."""
    kind: Kind
    name: str
    config: str | None = None
    split: str = "train"
    """The data set's own split, unrelated to our held-out split."""
    weight: float | None = None
    """Share of the mix, relative to the other weights."""
    files: str | None = None
    """The files to read from a repository, if not all."""
    fields: FieldMap | None = None
    uneven: bool = False
    """Whether unusable rows are expected and left out."""


def parse(text: str) -> Source:
    """Parse a source with its weight. Raises DataError for an unknown source, ConfigError for an invalid weight."""
    found = _WEIGHT.fullmatch(text)
    if found is None or Path(text).exists():
        return _parse(text)
    weight = float(found["weight"])
    if not 0 < weight < float("inf"):
        raise ConfigError(f"{text}: a weight must be above 0; leave the source out if nothing of it is wanted")
    return replace(_parse(found["name"]), weight=weight)


def _parse(text: str) -> Source:
    if text == "self":
        raise DataError(
            "self, what a target makes up, is data of `eagle-train --data self` alone; elsewhere make a file first, "
            "with eagle-data make, and name that (a folder of this name is ./self)"
        )
    if text.startswith("builtin:"):
        return Source(text, "builtin", text)
    if text.startswith("preset:"):
        return _preset(text)
    if text.endswith(SUFFIXES):
        return Source(text, "file", text)
    name, *rest = re.split(r":(?![^\[]*\])", text)
    known = len(rest) <= 2 and all(_PART.fullmatch(part) for part in rest)
    config, split = rest[0] if len(rest) == 2 else None, rest[-1] if rest else "train"
    if known and Path(name).is_dir():
        return Source(text, "folder", name, config, split)
    if known and _HUB.fullmatch(name) and not Path(name).exists():
        return Source(text, "hub", name, config, split)
    raise DataError(f"{text} is no source of conversations; these are:\n{SPECS}")


def _preset(text: str) -> Source:
    name, at, place = text.removeprefix("preset:").partition("@")
    preset = presets.find(name)
    if not at:
        return Source(
            text, "hub", preset.id, preset.config, preset.split, None, preset.files, preset.map, preset.uneven
        )
    source = _parse(place)
    return replace(source, spec=text, fields=preset.map, uneven=preset.uneven)
