"""File layouts for MTP heads: this project's own, and that of vllm-project/speculators.

Ours has `enorm`, `hnorm`, `eh_proj`, `block.*` with mlx-lm's names, `norm` and, if the head has its own, `embed_tokens`
and `lm_head`. The fields of MTPConfig are under `eagle_mlx_mtp` in config.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from eagle_mlx.errors import CheckpointError, ConfigError
from eagle_mlx.formats.fields import quantization_json, read_config, reading
from eagle_mlx.formats.tensors import SaveOptions, fill, read_weights, save_head, weights_of
from eagle_mlx.heads.mtp.head import MTPConfig, MTPHead
from eagle_mlx.heads.mtp.published import mtp_of_speculators
from eagle_mlx.heads.precision import make_quantized, quantize

FIELD = "eagle_mlx_mtp"
ARCHITECTURE = "EagleMLXMTPHead"


def save_mtp(head: MTPHead, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    """Write a head to a folder, which appears only once complete. Quantized weights stay quantized.

    Raises OutputError if the folder cannot be written.
    """
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": head.config.model_type,
        "hidden_size": head.hidden_size,
        "vocab_size": head.vocab_size,
        FIELD: dataclasses.asdict(head.config),
        **quantization_json(head.config.quantization),
    }
    save_head(folder, config, weights_of(head), **options)


def load_mtp(folder: str | Path) -> MTPHead:
    """Read a head in either layout.

    Raises CheckpointError if the folder is in neither layout, if a file is damaged, or if any tensor is missing,
    unknown or of the wrong shape.
    """
    folder = Path(folder)
    written, tensors = read_config(folder), read_weights(folder)
    if written.get("speculators_model_type") == "mtp":
        with reading(folder / "config.json"):
            config, tensors, _ = mtp_of_speculators(written, tensors)
    else:
        config = _from_json(folder, written)
    with reading(folder / "config.json"):
        head = MTPHead(config)
        make_quantized(head, config.quantization, tensors)
    fill(folder, head, tensors)
    return head


def _from_json(folder: Path, written: Mapping[str, Any]) -> MTPConfig:
    file = folder / "config.json"
    fields = written.get(FIELD)
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file} has no {FIELD}, so it is not an MTP head of this project")
    unknown = sorted(fields.keys() - {field.name for field in dataclasses.fields(MTPConfig)})
    if unknown:
        raise CheckpointError(f"{file} sets {FIELD}.{unknown[0]}, which is not known; update EAGLE-MLX")
    with reading(file):
        return MTPConfig(**fields)


def quantized(head: MTPHead, bits: int = 4, group_size: int = 64) -> MTPHead:
    """Quantize the head's large matrices in place, except expert routers, and return it.

    Raises ConfigError if the hidden size is not a multiple of the group size.
    """
    if head.hidden_size % group_size:
        raise ConfigError(f"a hidden size of {head.hidden_size} is not a multiple of the group size {group_size}")
    quantize(head, bits, group_size)
    return head
