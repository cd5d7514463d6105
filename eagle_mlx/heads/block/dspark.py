"""DSpark's layouts in which the fields lie at the top level or in `dflash_config`: DeepSpec, SpecForge, LiquidAI.

DeepSpec (`Qwen3DSparkModel`) writes an embedding and an output projection; its `dflash_*_block7` are DSpark heads
without a Markov head. SpecForge (`DSparkDraftModel`) and LiquidAI (`Lfm2DSparkDraftModel`) leave both to the target.
Blocks are bidirectional; in SpecForge, as in its DFlash, layers with a window are causal and their windows end at each
slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import mlx.core as mx

from eagle_mlx.errors import CheckpointError, ConfigError
from eagle_mlx.formats.fields import read_config, reading
from eagle_mlx.formats.tensors import SaveOptions, save_head, weights_of
from eagle_mlx.heads.block.config import BlockConfig
from eagle_mlx.heads.block.fields import (
    DFLASH,
    DSPARK,
    SHARED,
    TRAINING,
    all_or_none,
    build,
    causal_by_type,
    check_fields,
    check_sayable,
    dspark_fields,
    dspark_json,
    is_of,
    layer_json,
    one_of,
    own_ends,
    read_block_weights,
    shared_fields,
)
from eagle_mlx.heads.block.gemma import ARCHITECTURE as GEMMA
from eagle_mlx.heads.block.gemma import gemma_json, read_gemma
from eagle_mlx.heads.block.head import DSparkHead
from eagle_mlx.heads.block.zlab import causal_json

DEEPSPEC = "Qwen3DSparkModel"
SPECFORGE, LIQUID = "DSparkDraftModel", "Lfm2DSparkDraftModel"
_OF_GEMMA = (
    *("attention_k_eq_v", "global_head_dim", "num_global_key_value_heads", "final_logit_softcapping"),
    *("num_kv_shared_layers", "use_bidirectional_attention", "vocab_size_per_layer_input"),
)
_KNOWN = (*SHARED, *DSPARK, *TRAINING, "confidence_head_alpha", "target_model_type", "target_text_model_type")


def load_deepspec(folder: str | Path, target_layers: int | None = None) -> DSparkHead:
    """Read a DSpark head. Arguments and errors as in `load_zlab`; unknown fields of the top level only give a warning,
    because DeepSpec copies the target's config."""
    folder = Path(folder)
    if is_of(read_config(folder), GEMMA):
        return _read(folder, *read_gemma(folder), target_layers)
    # Copied from the target's config; DeepSpec's attention turns whole heads.
    written = {name: value for name, value in read_config(folder).items() if name != "partial_rotary_factor"}
    rope = written.get("rope_parameters")
    if isinstance(rope, dict):
        written["rope_parameters"] = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
    return _read(folder, written, {}, target_layers)


def _read(folder: Path, written: Mapping[str, Any], own: Mapping[str, Any], target_layers: int | None) -> DSparkHead:
    """Read a head of DeepSpec's; `own` replaces fields of the config."""
    file = folder / "config.json"
    check_fields(file, written, (*_KNOWN, *_OF_GEMMA), strict=False)
    tensors = read_block_weights(folder)
    with reading(file):
        fields = {**shared_fields(written, target_layers), **own}
        if fields["windows"]:
            raise ConfigError("a layer slides; DeepSpec trains layers with full attention")
        first = bool(written.get("sample_from_anchor", True))
        config = BlockConfig(**fields, **dspark_fields(written, tensors), **own_ends(tensors), first_slot_drafts=first)
        return build(folder, DSparkHead, config, tensors)


def load_specforge(folder: str | Path, target_layers: int | None = None) -> DSparkHead:
    """Read a DSpark head of SpecForge's or LiquidAI's. Arguments and errors as in `load_zlab`."""
    folder = Path(folder)
    written = read_config(folder)
    file = folder / "config.json"
    check_fields(file, written, _KNOWN, (*_KNOWN, "projector_type"))
    projector = (written.get(DFLASH) or {}).get("projector_type", "dspark")
    if projector != "dspark":
        raise CheckpointError(f"{file} sets {DFLASH}.projector_type to {projector!r}; only dspark is known")
    tensors = read_block_weights(folder)
    with reading(file):
        fields = shared_fields(written, target_layers)
        layers, causal = fields["num_hidden_layers"], written.get("is_causal")
        config = BlockConfig(
            **fields,
            **dspark_fields(written, tensors),
            **own_ends(tensors),
            causal=causal_by_type(fields["windows"], layers)
            if causal is None
            else all_or_none((bool(causal),) * layers),
            first_slot_drafts=bool(one_of(written, "sample_from_anchor", True)),
        )
        return build(folder, DSparkHead, config, tensors)


def save_deepspec(
    head: DSparkHead,
    folder: str | Path,
    **options: Unpack[SaveOptions],
) -> None:
    """Write a head in DeepSpec's layout. Arguments and errors as in `save_zlab`."""
    config = head.config
    scaled = {"gemma": True, "output_multiplier": 1.0, "embedding_scale": config.hidden_size**0.5}
    output = scaled if config.gemma else _PLAIN_OUTPUT
    check_sayable(config, "DeepSpec's", windows=(), causal=(), interleaved_rope=False, **output)
    placed = {**_block_json(config), **dspark_json(config), "architectures": [GEMMA if config.gemma else DEEPSPEC]}
    placed |= gemma_json(config) if config.gemma else {}
    _write(head, folder, placed, options)


def save_specforge(
    head: DSparkHead,
    folder: str | Path,
    **options: Unpack[SaveOptions],
) -> None:
    """Write a head in SpecForge's layout. Arguments and errors as in `save_zlab`."""
    config = head.config
    check_sayable(config, "SpecForge's", **_PLAIN_OUTPUT, **({"window_start": "slot"} if config.windows else {}))
    nested = {**_block_json(config), **dspark_json(config), "projector_type": "dspark"}
    placed = {"architectures": [SPECFORGE], "block_size": config.block_size, **causal_json(config), DFLASH: nested}
    _write(head, folder, placed, options)


_PLAIN_OUTPUT = {"embedding_scale": None, "output_multiplier": 1.0, "logit_softcap": None}


def _block_json(config: BlockConfig) -> dict[str, Any]:
    layers = list(config.aux_layers)
    return {"block_size": config.block_size, "mask_token_id": config.mask_token_id, "target_layer_ids": layers}


def _write(head: DSparkHead, folder: str | Path, placed: Mapping[str, Any], options: SaveOptions) -> None:
    config = head.config
    check_sayable(config, "this", draft_vocab_size=config.vocab_size, gemma=config.gemma)
    save_head(folder, {**layer_json(config), **placed}, weights_of(head), **options)


def holds_deepspec(config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> bool:
    return is_of(config, DEEPSPEC, GEMMA)


def holds_specforge(config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> bool:
    return is_of(config, SPECFORGE, LIQUID)
