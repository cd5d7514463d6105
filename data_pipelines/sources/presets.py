"""Well-known conversation data sets: their place on the hub and the names of their fields, from `presets.yaml`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eagle_mlx.errors import ConfigError
from eagle_mlx.files import read_yaml


@dataclass(frozen=True)
class Preset:
    """A data set; `presets.yaml` explains the fields."""

    id: str
    split: str
    holds: str
    license: str
    names: Mapping[str, str]
    config: str | None = None
    files: str | None = None
    uneven: bool = False


PRESETS = {
    name: Preset(**entry)
    for name, entry in read_yaml(Path(__file__).with_name("presets.yaml"), "list of presets").items()
}


def find(name: str) -> Preset:
    """Return the preset with this name. Raises ConfigError, with the nearest name, if there is none."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"preset:{name}: {hint}the presets are {', '.join(PRESETS)} (see `eagle-data presets`)")
    return PRESETS[name]


def describe() -> str:
    """Return a description of all presets."""
    parts = []
    for name, preset in PRESETS.items():
        fields = ", ".join(f"{ours}={theirs}" for ours, theirs in preset.names.items())
        what = ":".join(part for part in (preset.id, preset.config, preset.split) if part)
        lines = [f"preset:{name}", f"  reads    {what}" + (f", file {preset.files}" if preset.files else "")]
        lines += [f"  fields   {fields}", f"  holds    {preset.holds}", f"  license  {preset.license}"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
