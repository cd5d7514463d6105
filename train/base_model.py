"""The model that a target was made of, which other servers load in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import yaml
from huggingface_hub import metadata_load

from eagle_mlx import hub
from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.formats.fields import read_config

BASE_MODEL = "base_model"
"""The field that names it: in a model's card, and under `eagle_mlx` in a head's config."""
_CARD = "README.md"


def check_id(given: str) -> str:
    """A hub id that was given with --base-model. Raises ConfigError where it is none."""
    try:
        hub.check_full_id(given)
    except EagleError as e:
        raise ConfigError(f"--base-model: {e}; give the hub id of the model, such as Qwen/Qwen3-4B") from e
    return given


def by_mlx_community(name: str) -> bool:
    """Whether a hub id is of the community whose models only MLX reads."""
    return name.startswith(f"{hub.DEFAULT_OWNER}/")


def base_model_of(target: str) -> str | None:
    """Hub id of the model that other servers load in a target's place; None where nothing certain says so.

    A model of the hub that MLX has not written is that itself. Of one that MLX has quantised it is what the card names,
    as mlx-lm writes it. What MLX has written without quantising it may be a fine-tune as well. Raises EagleError where
    the target cannot be had.
    """
    folder = hub.resolve(target)
    if "quantization" in read_config(folder):
        return _named_by(_card(target, folder))
    by_mlx = any(_format(file) == "mlx" for file in folder.glob("*.safetensors"))
    return target if hub.full_id(target) and not by_mlx else None


def _format(file: Path) -> str | None:
    loaded: Any = mx.load(str(file), return_metadata=True)
    found: str | None = loaded[1].get("format")
    return found


def _card(target: str, folder: Path) -> dict[str, Any]:
    """What a model's card says to the hub; nothing where there is no card, or none that can be read or fetched."""
    repo = None if Path(target).expanduser().is_dir() else hub.hub_id(target)
    try:
        file = hub.fetch_file(repo, _CARD, folder.name, required=False) if repo else folder / _CARD
        return (metadata_load(file) if file else None) or {}
    except (EagleError, OSError, ValueError, yaml.YAMLError):
        return {}


def _named_by(card: dict[str, Any]) -> str | None:
    """The one model that a conversion's card says it was made of, which is no conversion in turn."""
    named = card.get(BASE_MODEL)
    base = named[0] if isinstance(named, list) and len(named) == 1 else named
    if not isinstance(base, str) or card.get("base_model_relation", "quantized") != "quantized":
        return None
    return base if hub.full_id(base) and not by_mlx_community(base) else None
