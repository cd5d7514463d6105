"""A file of models: under each name the settings of a model, by the names of their flags."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from eagle_mlx import hub
from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.files import read_yaml
from eagle_mlx.setting import flag, settings_of

from ..speculation import AUTO, NO_HEAD
from .loader import LoadConfig

DEFAULT = "default"
"""The entry whose settings all models share."""
_KEPT_NAMES = (None, AUTO, NO_HEAD)
"""Values of `head` that are no places."""


def read_models(file: Path) -> dict[str, LoadConfig]:
    """The models of a file by name. Nothing is loaded or fetched.

    Raises ConfigError that names file, entry and remedy for what cannot be read, is not known, given twice or missing.
    """
    entries = _read(file)
    shared = entries.pop(DEFAULT, None)
    if not entries:
        raise ConfigError(f"{file} names no model; write one as `name: {{target: folder or hub id}}`")
    settings = {name: _settings(file, name, values) for name, values in [(DEFAULT, shared), *entries.items()]}
    shared = settings.pop(DEFAULT)
    return {name: _config(file, name, {**shared, **own}) for name, own in settings.items()}


def _read(file: Path) -> dict[str, Any]:
    entries = read_yaml(file, "file of models")
    if not isinstance(entries, dict):
        raise ConfigError(f"{file} must hold models as `name: {{target: folder or hub id}}`")
    for name in entries:
        if not (isinstance(name, str) and name and name.isprintable()):
            raise ConfigError(f"{file}: {name!r} is no name for a model; write it in quotes")
    return entries


def _settings(file: Path, name: str, values: Any) -> dict[str, Any]:
    """An entry's settings by their names in the code."""
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: {name}: must hold settings such as `target: folder or hub id`, not {values!r}")
    known, found, keys = _keys(), dict[str, Any](), dict[str, str]()
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; they are {', '.join(known)}"
            raise ConfigError(f"{file}: {name}: {key!r} is not a setting of a model{hint}")
        setting, negated = known[key]
        if setting in keys:
            raise ConfigError(f"{file}: {name}: {keys[setting]} and {key} are the same; give one")
        keys[setting] = key
        if negated and not isinstance(value, bool | None):
            raise ConfigError(f"{file}: {name}: {key} must be true or false, not {value!r}")
        found[setting] = not value if negated and value is not None else value
    return found


def _config(file: Path, name: str, settings: Mapping[str, Any]) -> LoadConfig:
    if not settings.get("target"):
        raise ConfigError(f"{file}: {name}: has no target; add `target: folder or hub id`")
    try:  # None is as if the setting were not there, when `default` has it
        config = LoadConfig.of(**{key: value for key, value in settings.items() if value is not None}).resolved()
    except EagleError as e:
        raise ConfigError(f"{file}: {name}: {e}") from e
    speculation = config.speculation
    for key, place in (("target", config.name), ("head", speculation.head), ("draft-model", speculation.draft_model)):
        if place is not None and place not in _KEPT_NAMES and _is_missing(place):
            raise ConfigError(f"{file}: {name}: {key} {place} is no folder here; correct the path, or give a hub id")
    return config


def _is_missing(place: str | Path) -> bool:
    """Whether a name can only be a folder's, and there is none."""
    return not Path(place).expanduser().is_dir() and hub.hub_id(place) is None


@cache
def _keys() -> Mapping[str, tuple[str, bool]]:
    """By key: the setting, and whether the key says the opposite (`no-prior`)."""
    keys = {}
    for known in settings_of(LoadConfig).values():
        for each in (known.name, *known.also):
            keys[flag(each)[2:]] = known.name, False
        if known.type is bool:
            keys[f"no-{flag(known.name)[2:]}"] = known.name, True
    return keys
