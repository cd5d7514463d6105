"""Parse names of sources: `chats.jsonl`, `user/name:config:split=0.3`, `preset:gsm8k@rows.parquet`.

Presets are well-known data sets with their place on the hub and the names of their fields, from `presets.yaml`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from eagle_mlx.errors import ConfigError, DataError, did_you_mean
from eagle_mlx.files import read_yaml

from .rows import FieldMap

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
SPECS = """\
  builtin:python             functions of Python's standard library as conversations, and some plain files
  builtin:python-chat        only the conversations
  builtin:python-docstrings  only conversations about functions with a docstring
  builtin:python-files       only plain files, in pieces
  text:PLACE                 a plain text file, or all text files under a folder, in pieces
  chats.jsonl, .jsonl.gz, .json, .parquet    a local file
  folder, folder:split, folder:config:split    a data set in a local folder, laid out as on the hub
  user/name, user/name:split, user/name:config:split    a data set on the hub; a split may be sliced: train[:10%]
  preset:ultrachat           a well-known data set (`eagle-data presets` lists them)
  preset:ultrachat@PLACE     the same set from a file, a folder or another hub id with its rows
SOURCE=WEIGHT mixes sources: a.jsonl=0.7 b.parquet=0.3"""
PRESETS_FILE = Path(__file__).with_name("presets.yaml")
PRESETS: dict[str, dict[str, Any]] = read_yaml(PRESETS_FILE, "list of presets")
_WEIGHT = re.compile(r"(?P<name>.+)=(?P<weight>[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?)", re.IGNORECASE)
_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PART = re.compile(r"[\w.-]+(\[[\d%:-]*\])?(\+[\w.-]+(\[[\d%:-]*\])?)*")


@dataclass(frozen=True)
class Source:
    spec: str
    """The name as given, without its weight. Error messages and maps use it."""
    kind: Literal["builtin", "text", "file", "folder", "hub"]
    name: str
    config: str | None = None
    split: str = "train"
    """The data set's own split, unrelated to our held-out split."""
    weight: float | None = None
    files: str | None = None
    """The files to read from a repository, if not all."""
    fields: FieldMap | None = None
    uneven: bool = False
    """Whether unusable rows are expected and left out."""


def parse(text: str) -> Source:
    """Parse a source with its weight. Raises DataError for an unknown source, ConfigError for an invalid weight."""
    match = _WEIGHT.fullmatch(text)
    if match is None or Path(text).exists():
        return _parse(text)
    weight = float(match["weight"])
    if not 0 < weight < float("inf"):
        raise ConfigError(f"{text}: a weight must be above 0; leave the source out if you want nothing from it")
    return replace(_parse(match["name"]), weight=weight)


def public_source(text: str) -> str:
    """Return a source's name for files that others get: of a local path, the last part."""
    try:
        source = parse(text)
    except (ConfigError, DataError):
        return text
    is_local = source.kind in ("file", "folder", "text")
    return text.replace(source.name, Path(source.name).name) if is_local else text


def hub_data_set(text: str) -> str | None:
    """Return the hub id `user/name` of a source's data set; None if it is none of the hub's."""
    try:
        source = parse(text)
    except (ConfigError, DataError):
        return None
    return source.name if source.kind == "hub" and "/" in source.name else None


def _parse(text: str) -> Source:
    if text == "self":
        raise DataError(
            "only `eagle-train --data self` has the source self (text that the target makes up); make a file with "
            "`eagle-data make` and name that instead (for a folder of this name, write ./self)"
        )
    if text.startswith("builtin:"):
        return Source(text, "builtin", text)
    if text.startswith("text:"):
        return Source(text, "text", text.removeprefix("text:"))
    if text.startswith("preset:"):
        return _preset(text)
    if text.endswith(SUFFIXES):
        return Source(text, "file", text)
    name, *rest = re.split(r":(?![^\[]*\])", text)
    if len(rest) <= 2 and all(_PART.fullmatch(part) for part in rest):
        config, split = rest[0] if len(rest) == 2 else None, rest[-1] if rest else "train"
        if Path(name).is_dir():
            return Source(text, "folder", name, config, split)
        if _HUB.fullmatch(name) and not Path(name).exists():
            return Source(text, "hub", name, config, split)
    raise DataError(f"{text} is not a source of conversations; sources are:\n{SPECS}")


def _preset(text: str) -> Source:
    name, at, place = text.removeprefix("preset:").partition("@")
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS)
        raise ConfigError(f"preset:{name}: {hint}the presets are {', '.join(PRESETS)} (see `eagle-data presets`)")
    preset = PRESETS[name]
    options = {key: preset[key] for key in ("config", "split", "files") if key in preset}
    source = _parse(place) if at else Source(text, "hub", preset["id"], **options)
    return replace(source, spec=text, fields=FieldMap(preset["names"]), uneven=preset.get("uneven", False))
