"""Names of models: a local folder, a hub id, or a bare name of the mlx-community."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from eagle_mlx.errors import EagleError

DEFAULT_OWNER = "mlx-community"
_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken")


def resolve(name: str | Path) -> Path:
    """The local folder of a model: an existing folder as it is, anything else through the hub's cache.

    `Qwen3-32B-4bit` means `mlx-community/Qwen3-32B-4bit`. Raises EagleError where the name is no folder and the hub
    has no such model or cannot be reached.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise EagleError(f"{folder} is a file; give the folder that holds it")
    repo = hub_id(name)
    if repo is None:
        raise EagleError(f"there is no folder {folder}")
    try:
        return Path(huggingface_hub.snapshot_download(repo, allow_patterns=list(_WANTED)))
    except RepositoryNotFoundError as e:
        raise EagleError(f"{name} is neither a folder here nor a model on the hub (asked for {repo})") from e
    except LocalEntryNotFoundError as e:
        raise EagleError(
            f"{name} is no folder here, {repo} is not in the hub's cache, and the hub cannot be reached; "
            "check the path, or fetch the model while there is a network"
        ) from e
    except (HFValidationError, HfHubHTTPError, OSError) as e:
        raise EagleError(f"{repo} cannot be fetched from the hub: {e}") from e


def hub_id(name: str | Path) -> str | None:
    """The hub id that a name stands for, or None where it can only be a path."""
    text = str(name)
    if not text or text.startswith(("/", ".", "~")) or text.endswith("/") or "\\" in text or text.count("/") > 1:
        return None
    return text if "/" in text else f"{DEFAULT_OWNER}/{text}"


def public_name(name: str | Path) -> str:
    """What a model may be called in a file that others get: its hub id, or the name of its folder without the path."""
    folder = Path(name).expanduser()
    return folder.resolve().name if folder.is_dir() else hub_id(name) or folder.name
