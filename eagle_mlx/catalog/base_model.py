"""The base model of a target, which other servers load instead of an MLX conversion, and the names of a target."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import yaml
from huggingface_hub import metadata_load

from eagle_mlx import hub
from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.formats.fields import read_config

BASE_MODEL = "base_model"  # the field for the base model, in a model's card and under `eagle_mlx` in a head's config
_CARD = "README.md"
_CONVERTED = re.compile(
    r"[-_.](mlx|gguf|\d+(\.\d+)?bpw|\d+-?bits?|int[48]|[bf]+p?(16|32)|fp8|q[2-8]|gs\d+|d?dwq(-\d+)?|awq|gptq|[mn][xv]fp[48])$",
    re.IGNORECASE,
)
"""The suffixes in names of conversions, as mlx-community and others use them."""
_RENAMED = re.compile(r"^meta-(?=llama-3)", re.IGNORECASE)
"""Meta first published Llama 3.1 as Meta-Llama-3.1, and conversions keep that name."""


def check_id(given: str) -> str:
    """Return the hub id given as --base-model. Raises ConfigError if it is not a hub id."""
    try:
        hub.check_full_id(given)
    except EagleError as e:
        raise ConfigError(f"--base-model: {e}; give the hub id of the model, such as Qwen/Qwen3-4B") from e
    return given


def check_base_model(given: str) -> None:
    """Check a --base-model, a folder or hub id that other servers will load. Uses no network.

    Raises ConfigError if it is neither or is known to be an MLX conversion, CheckpointError if the folder has no model.
    """
    place = Path(given).expanduser()
    folder = place if place.is_dir() else hub.cached(check_id(given))
    if not by_mlx_community(given) and (folder is None or "quantization" not in read_config(folder)):
        return
    base = _named_by(_read(folder / _CARD)) if folder is not None else None
    instead = f"{base}, which its card names" if base else "the hub id or folder of the original model"
    raise ConfigError(
        f"--base-model {given} is an MLX conversion, which speculators and vLLM cannot load; give {instead}"
    )


def check_width(given: str, width: int, online: bool = True) -> None:
    """Raise ConfigError if the hidden size of a --base-model is not that of the head's target.

    Checks nothing if the model's config is not on this machine and, if `online`, the hub does not have it.
    """
    place, folder = Path(given).expanduser(), None
    with suppress(EagleError):
        folder = place if place.is_dir() else hub.fetch_file(given, "config.json").parent if online else None
    folder = folder or hub.cached(given)
    config = read_config(folder) if folder is not None else {}
    size = (config.get("text_config") or config).get("hidden_size")
    if isinstance(size, int) and size != width:
        raise ConfigError(
            f"--base-model {given} has hidden states of {size} numbers, but the head is for a model with {width}; "
            "give the model that the head was trained for"
        )


def by_mlx_community(name: str) -> bool:
    """Return whether a hub id belongs to mlx-community. Only MLX reads its models."""
    return name.startswith(f"{hub.DEFAULT_OWNER}/")


def base_model_of(target: str) -> str | None:
    """Return the hub id of the model that other servers load for a target; None if it is not certain.

    A hub model that MLX did not write is its own base model. For a model that MLX quantized, the card names it. For
    others that MLX wrote, which may be fine-tunes, it is unknown. Raises EagleError if the target is not available.
    """
    folder = hub.resolve(target)
    if "quantization" in read_config(folder):
        return _named_by(_card(target, folder))
    written: list[Any] = [mx.load(str(file), return_metadata=True) for file in folder.glob(hub.WEIGHTS)]
    by_mlx = any(metadata.get("format") == "mlx" for _, metadata in written)
    return target if hub.full_id(target) and not by_mlx else None


def _card(target: str, folder: Path) -> dict[str, Any]:
    """Return the metadata of a model's card; empty if there is no card, or if it cannot be read or fetched."""
    repo = None if Path(target).expanduser().is_dir() else hub.hub_id(target)
    try:
        return _read(hub.fetch_file(repo, _CARD, folder.name) if repo else folder / _CARD)
    except EagleError:
        return {}


def _read(card: Path) -> dict[str, Any]:
    """Return a local card's metadata; empty if it cannot be read."""
    try:
        return metadata_load(card) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}


def _named_by(card: dict[str, Any]) -> str | None:
    """Return the base model that a conversion's card names; None unless it is one original model."""
    named = card.get(BASE_MODEL)
    base = named[0] if isinstance(named, list) and len(named) == 1 else named
    if not isinstance(base, str) or card.get("base_model_relation", "quantized") != "quantized":
        return None
    return base if hub.full_id(base) and not by_mlx_community(base) else None


def names_of(target: str | Path) -> tuple[str, ...]:
    """Return a model's own name, then its base model's if that is known on this machine. Fetches nothing."""
    own = hub.public_name(target)
    place = Path(target).expanduser()
    folder = place if place.is_dir() else hub.cached(own)
    config = read_config(folder) if folder is not None and (folder / "config.json").is_file() else {}
    named = config.get(BASE_MODEL)
    if named is None and ("quantization" in config or by_mlx_community(own)):  # else it may be fine-tuned
        named = _named_by(_read(folder / _CARD)) if folder is not None else None
    return (own, named) if isinstance(named, str) and named != own else (own,)


def same_model(name: str, published: str) -> bool:
    """Return whether a name is a published model or a conversion of it. Owners must match if both are given."""
    owner, other = (x.rpartition("/")[0].lower() for x in (name, published))
    return (owner in ("", other) or by_mlx_community(name)) and _plain(name) == _plain(published)


def _plain(name: str) -> str:
    """Return a model's name in lower case, without its owner and its conversion's suffixes."""
    short = name.rpartition("/")[2]
    while (cut := _CONVERTED.sub("", short)) != short:
        short = cut
    return _RENAMED.sub("", short).lower()
