"""The few files of a published model that hold its MTP layer, from the hub."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import huggingface_hub
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from eagle_mlx import hub
from eagle_mlx.errors import EagleError
from eagle_mlx.formats.fields import read_config, reading
from eagle_mlx.formats.mtp_files import INDEX, read_index, shards_of
from eagle_mlx.formats.mtp_source import mtp_prefix

_WHOLE = "model.safetensors"
_TransportError = cast("type[Exception]", HfHubHTTPError.__bases__[0])


def mtp_folder(source: str, index: int = 0) -> Path:
    """A folder with config.json and the weights of MTP layer `index`: a folder here, or what is fetched of a hub id.

    Of a model in shards only those that hold the layer are fetched. Raises EagleError where the model cannot be had,
    and CheckpointError where it has no such layer.
    """
    repo = None if Path(source).expanduser().exists() else hub.hub_id(source)
    if repo is None:
        return hub.resolve(source)
    config = _get(repo, "config.json")
    assert config is not None
    folder, commit = config.parent, config.parent.name
    with reading(config):
        prefix = mtp_prefix(read_config(folder), index)
    listed = _get(repo, INDEX, commit, required=False)
    shards = [_WHOLE] if listed is None else shards_of(repo, read_index(listed), prefix)
    for shard in shards:
        _get(repo, shard, commit)
    return folder


def _get(repo: str, file: str, commit: str | None = None, required: bool = True) -> Path | None:
    """One file of a repository; None where it has no such file and need not."""
    try:
        return Path(huggingface_hub.hf_hub_download(repo, file, revision=commit))
    except GatedRepoError as e:
        raise EagleError(f"{repo} is gated: ask for access on its page, then {hub.LOGIN} of that account") from e
    except RepositoryNotFoundError as e:
        raise EagleError(
            f"{repo} is neither a folder here nor a model on the hub; if it is private, {hub.LOGIN}"
        ) from e
    except LocalEntryNotFoundError as e:
        if not required:
            return None  # without a network nobody knows whether there is one; the weights' own name is asked for next
        raise EagleError(
            f"{file} of {repo} is not in the hub's cache, and the hub cannot be reached; check the name, or fetch it "
            "while there is a network"
        ) from e
    except EntryNotFoundError as e:
        if not required:
            return None
        raise EagleError(f"{repo} has no {file}; take the repository in which the model was published") from e
    except (HfHubHTTPError, HFValidationError, OSError, _TransportError) as e:
        raise EagleError(f"{file} of {repo} cannot be fetched from the hub: {' '.join(str(e).split())}") from e
