"""Extract an MTP head from a published model, fetching only the files with the head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from eagle_mlx import hub
from eagle_mlx.catalog.head_search import register
from eagle_mlx.errors import ConfigError
from eagle_mlx.files import check_free
from eagle_mlx.formats.fields import read_config, reading
from eagle_mlx.formats.tensors import DTYPE_NAMES, INDEX, read_index, weights_of
from eagle_mlx.heads.mtp import choices_of, mtp_of_model, save_mtp
from eagle_mlx.heads.mtp.formats import quantized
from eagle_mlx.heads.mtp.published import SIDECAR, mtp_prefix, shards_of
from eagle_mlx.heads.precision import described
from eagle_mlx.setting import REQUIRED, Group, Limit, setting

Hidden = Literal["after", "before"]
OVERWRITE = "replace an existing output"
Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Extraction(Group):
    """The head to extract and its model. Raises ConfigError."""

    source: str = setting(REQUIRED, "folder or hub id of the published model", metavar="MODEL")
    output: str | None = setting(None, "folder for the head (default: the model's name and -mtp)", metavar="DIR")
    index: int = setting(
        0, "number of the MTP layer, from 0", Limit(lambda index: index >= 0, "counts MTP layers from 0; got {}")
    )
    bits: Literal[4, 8] | None = setting(None, "quantize the large matrices to this many bits")
    group_size: Literal[32, 64, 128] = setting(64, "with --bits: weights that share a scale")
    hidden: Hidden = setting("after", "use the target's hidden state after or before its final norm")
    dtype: Dtype | None = setting(None, "dtype of unquantized weights (default: the model's)")
    overwrite: bool = setting(False, OVERWRITE)

    def _check(self) -> None:
        if not self.source:
            raise ConfigError("no source: give the model's folder or hub id with --source")


def extract(what: Extraction, say: Callable[[str], None]) -> str:
    """Extract the head and write it; return a line about the result. `say` is called with each decision.

    Raises an EagleError; then nothing is written.
    """
    output = what.output or f"{hub.public_name(what.source).rpartition('/')[2]}-mtp"
    check_free(output, what.overwrite)
    folder = _mtp_folder(what.source, what.index)
    say(f"reading MTP layer {what.index} of {what.source}")
    head, notes = mtp_of_model(folder, what.index, target_norm=what.hidden == "after")
    for line in [*notes, *choices_of(head, any("norms" in note for note in notes))]:
        say(line)
    dtype = DTYPES[what.dtype] if what.dtype else _dtype_of(read_config(folder))
    own = head.config.quantization
    if what.bits is not None and own is None:
        head = quantized(head, what.bits, what.group_size)
    save_mtp(head, output, target_name=hub.public_name(what.source), dtype=dtype, overwrite=what.overwrite)
    register(output, what.source, "extracted")
    size = sum(value.nbytes for value in weights_of(head).values())
    how = described(head) if head.config.quantization else DTYPE_NAMES[dtype]
    other = "before" if what.hidden == "after" else "after"
    return (
        f"{output}: an MTP head of {head.config.model_type} in {how}, {size / 1e6:,.1f} MB in memory. EAGLE-MLX loads "
        f"it; to try the other hidden state, convert again with --hidden {other} and compare with eagle-bench"
    )


def _dtype_of(config: dict[str, Any]) -> mx.Dtype:
    """Return the dtype of the model's unquantized weights, from its config."""
    parts = config, config.get("text_config") or {}
    named = next((part[key] for part in parts for key in ("torch_dtype", "dtype") if part.get(key)), None)
    return DTYPES.get(str(named), mx.bfloat16)


def _mtp_folder(source: str, index: int = 0) -> Path:
    """Return a folder with config.json and the weights of MTP layer `index`; from the hub, only the files with it.

    Raises EagleError if the model cannot be fetched, CheckpointError if it has no such layer.
    """
    repo = None if Path(source).expanduser().exists() else hub.hub_id(source)
    if repo is None:
        return hub.resolve(source)
    config = hub.fetch_file(repo, "config.json")
    assert config is not None
    folder, commit = config.parent, config.parent.name
    with reading(config):
        prefix = mtp_prefix(read_config(folder), index)
    if hub.fetch_file(repo, SIDECAR, commit, required=False) is not None:
        return folder
    listed = hub.fetch_file(repo, INDEX, commit, required=False)
    shards = ["model.safetensors"] if listed is None else shards_of(repo, read_index(listed), prefix)
    for shard in shards:
        hub.fetch_file(repo, shard, commit)
    return folder
