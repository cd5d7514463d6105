"""The few files of a published model that hold its MTP layer, from the hub."""

from __future__ import annotations

from pathlib import Path

from eagle_mlx import hub
from eagle_mlx.formats.fields import read_config, reading
from eagle_mlx.formats.mtp_files import shards_of
from eagle_mlx.formats.mtp_source import mtp_prefix
from eagle_mlx.formats.tensors import INDEX, read_index

_WHOLE = "model.safetensors"


def mtp_folder(source: str, index: int = 0) -> Path:
    """A folder with config.json and the weights of MTP layer `index`: a folder here, or what is fetched of a hub id.

    Of a model in shards only those that hold the layer are fetched. Raises EagleError where the model cannot be had,
    and CheckpointError where it has no such layer.
    """
    repo = None if Path(source).expanduser().exists() else hub.hub_id(source)
    if repo is None:
        return hub.resolve(source)
    config = hub.fetch_file(repo, "config.json")
    assert config is not None
    folder, commit = config.parent, config.parent.name
    with reading(config):
        prefix = mtp_prefix(read_config(folder), index)
    listed = hub.fetch_file(repo, INDEX, commit, required=False)
    shards = [_WHOLE] if listed is None else shards_of(repo, read_index(listed), prefix)
    for shard in shards:
        hub.fetch_file(repo, shard, commit)
    return folder
