"""The layout of vllm-project/speculators for DFlash and DSpark heads, with a separate config for the layers.

Layer ids are one higher than ours. A window counts the positions before the anchor, for all slots alike, and has no
effect within the block. Layers with a window are causal within the block unless `sliding_window_non_causal` is set.
The output projection is in the files only if the draft vocabulary is smaller than the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import mlx.core as mx

from eagle_mlx.errors import CheckpointError, ConfigError
from eagle_mlx.formats.fields import quantization_json, read_config, reading, speculators_json
from eagle_mlx.formats.tensors import SaveOptions, save_head, weights_of
from eagle_mlx.heads.base import build, vocabulary_tensors
from eagle_mlx.heads.block.config import BlockConfig
from eagle_mlx.heads.block.fields import (
    DSPARK,
    TRAINING,
    all_or_none,
    block_layer_json,
    causal_by_type,
    check_block_expressible,
    check_fields,
    dspark_fields,
    dspark_json,
    own_ends,
    read_block_weights,
    shared_fields,
)
from eagle_mlx.heads.block.head import BlockHead, DFlashHead, DSparkHead
from eagle_mlx.heads.eagle3.speculators import LAYER_DEFAULTS, NOT_READ

_IDS = "aux_hidden_state_layer_ids"
_KNOWN = (*TRAINING, *DSPARK, _IDS, "block_size", "mask_token_id", "sliding_window_non_causal", "max_anchors")
_CLASSES: dict[str, type[BlockHead]] = {"dflash": DFlashHead, "dspark": DSparkHead}
_SAVED_CLASSES = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}


def load_speculators_block(folder: str | Path, target_layers: int | None = None) -> BlockHead:
    """Read a DFlash or DSpark head. Arguments and errors as in `load_zlab`."""
    folder = Path(folder)
    file, written = folder / "config.json", read_config(folder)
    layer = written.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise CheckpointError(f"{file} lacks transformer_layer_config")
    if layer.get("model_type", "qwen3") != "qwen3":
        raise CheckpointError(f"{file} describes a layer of {layer['model_type']}; only qwen3 layers can be read")
    check_fields(file, written, _KNOWN)
    check_fields(file, layer, ())
    tensors = read_block_weights(folder, NOT_READ)
    with reading(file):
        config = _from_json(written, layer, tensors, target_layers)
    return build(folder, _CLASSES[written["speculators_model_type"]], config, tensors)


def _from_json(
    config: Mapping[str, Any], layer: Mapping[str, Any], tensors: Mapping[str, mx.array], target_layers: int | None
) -> BlockConfig:
    ids = config.get(_IDS)
    block = {name: config.get(name) for name in ("block_size", "mask_token_id")}
    own = {"quantization": config.get("quantization"), "target_layer_ids": [k - 1 for k in ids] if ids else None}
    fields = shared_fields({**LAYER_DEFAULTS["qwen3"], **layer, **block, **own}, target_layers)
    if config.get("target_hidden_size") not in (None, fields["hidden_size"]):
        raise ConfigError(
            f"target_hidden_size is {config['target_hidden_size']} but hidden_size {fields['hidden_size']}"
        )
    fields["draft_vocab_size"] = int(config.get("draft_vocab_size") or fields["vocab_size"])
    by_type = causal_by_type(fields["windows"], fields["num_hidden_layers"])
    markov = dspark_fields(config, tensors) if config["speculators_model_type"] == "dspark" else {}
    return BlockConfig(
        **fields,
        **own_ends(tensors),
        **markov,
        causal=() if config.get("sliding_window_non_causal") else by_type,
        window_start="anchor" if fields["windows"] else "slot",
        first_slot_drafts=_first_slot_drafts(config, fields["block_size"]),
    )


def _first_slot_drafts(config: Mapping[str, Any], block_size: int) -> bool:
    """Return whether the first slot drafts: in old files, whether there are as many speculative tokens as slots."""
    said = config.get("sample_from_anchor")
    if said is not None:
        return bool(said)
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return bool(methods[0].get("speculative_tokens") == block_size)


def save_speculators_block(
    head: BlockHead,
    folder: str | Path,
    *,
    base_model: str | None = None,
    target_architectures: Sequence[str] = (),
    depth: int | None = None,
    **options: Unpack[SaveOptions],
) -> None:
    """Write a head in this layout. Arguments and errors as in `save_zlab`.

    `base_model` is the target for other servers, a hub id or local folder; they read embedding and projection there.
    `depth` is not used: readers tell by the number of speculative tokens which slot drafts first.
    """
    config = head.config
    kind = "dspark" if isinstance(head, DSparkHead) else "dflash"
    _check_expressible(config)
    layer = {name: value for name, value in block_layer_json(config).items() if not name.startswith("quantization")}
    layer.pop("rope_theta")
    written = {
        "architectures": [_SAVED_CLASSES[kind]],
        **speculators_json(kind, base_model, target_architectures, config.drafts),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        _IDS: [k + 1 for k in config.aux_layers],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None,
        "sample_from_anchor": config.first_slot_drafts,
        "sliding_window_non_causal": bool(config.windows) and not config.causal,
        "transformer_layer_config": layer,
        **(dspark_json(config) if kind == "dspark" else {}),
        **quantization_json(config.quantization),
    }
    save_head(folder, written, weights_of(head), exact=vocabulary_tensors(head), **options)


def _check_expressible(config: BlockConfig) -> None:
    plain = {"embedding_scale": None, "output_multiplier": 1.0, "logit_softcap": None, "interleaved_rope": False}
    ends = {"own_embedding": False, "own_lm_head": config.draft_vocab_size < config.vocab_size}
    windows = {"window_start": "anchor"} if config.windows else {}
    check_block_expressible(config, "speculators'", **plain, **ends, **windows)
    by_type = causal_by_type(config.windows, config.num_hidden_layers)
    if all_or_none(config.causal) not in ((), by_type):
        raise ConfigError(f"speculators' layout cannot express causal={config.causal}; choose another layout")
