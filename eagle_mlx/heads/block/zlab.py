"""z-lab's layout of DFlash and DFlash2 heads, without an embedding and an output projection of their own.

A window ends at each slot and includes it. Layers with a window are causal within the block, unless `is_causal` or
`dflash_config.causal` say otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import mlx.core as mx

from eagle_mlx.errors import ConfigError
from eagle_mlx.formats.fields import read_config, reading
from eagle_mlx.formats.tensors import SaveOptions, save_head, weights_of
from eagle_mlx.heads.block.config import BlockConfig
from eagle_mlx.heads.block.fields import (
    DFLASH,
    SHARED,
    TRAINING,
    all_or_none,
    build,
    causal_by_type,
    check_fields,
    check_sayable,
    is_of,
    layer_json,
    one_of,
    read_block_weights,
    shared_fields,
)
from eagle_mlx.heads.block.head import DFlash2Head, DFlashHead

ARCHITECTURE, ARCHITECTURE_2 = "DFlashDraftModel", "DFlash2DraftModel"
_SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
_OUTPUT = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
_KNOWN = (*SHARED, *_OUTPUT, *TRAINING)
_NESTED = (*SHARED, *_OUTPUT, *TRAINING, "causal")


def load_zlab(folder: str | Path, target_layers: int | None = None) -> DFlashHead | DFlash2Head:
    """Read a DFlash or DFlash2 head.

    `target_layers` determines the aux layers if the config does not name them. Raises CheckpointError if a file is
    damaged, if any tensor or field is missing or unknown, or if a field's value is not implemented.
    """
    folder = Path(folder)
    written = read_config(folder)
    file = folder / "config.json"
    second = is_of(written, ARCHITECTURE_2)
    own = _SELECTOR if second else ()
    check_fields(file, written, (*_KNOWN, *own), (*_NESTED, *own))
    with reading(file):
        fields = shared_fields(written, target_layers)
        scale, softcap = one_of(written, "input_embedding_scale"), one_of(written, "final_logit_softcapping")
        selector: dict[str, Any] = {name: int(_needed(written, name)) for name in own}
        config = BlockConfig(
            **fields,
            causal=_causal(written, fields),
            embedding_scale=None if scale is None else float(scale),
            output_multiplier=float(one_of(written, "output_multiplier", 1.0)),
            logit_softcap=float(softcap) if softcap else None,
            **selector,
        )
        tensors = read_block_weights(folder)
        tensors = {f"{name}.weight" if name in _CODEBOOKS else name: x for name, x in tensors.items()}
        if second:
            return build(folder, DFlash2Head, config, tensors)
        return build(folder, DFlashHead, config, tensors)


def _needed(config: Mapping[str, Any], name: str) -> Any:
    value = one_of(config, name)
    if value is None:
        raise KeyError(name)
    return value


def _causal(config: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[bool, ...]:
    layers, said = fields["num_hidden_layers"], config.get("is_causal")
    said = (config.get(DFLASH) or {}).get("causal") if said is None else said
    if said is None:
        return causal_by_type(fields["windows"], layers)
    return all_or_none((bool(said),) * layers)


def save_zlab(
    head: DFlashHead | DFlash2Head,
    folder: str | Path,
    **options: Unpack[SaveOptions],
) -> None:
    """Write a head in this layout to a folder, which appears only once complete.

    Raises ConfigError if this layout cannot express the head, OutputError if the folder cannot be written.
    """
    config = head.config
    plain = {
        "conv_kernel_size": config.conv_kernel_size,
        "own_embedding": False,
        "own_lm_head": False,
        "first_slot_drafts": False,
    }
    check_sayable(config, "z-lab's", **plain, **({"window_start": "slot"} if config.windows else {}))
    second, weights = isinstance(head, DFlash2Head), weights_of(head)
    own = {name: getattr(config, name) for name in _SELECTOR} if second else {}
    written = {
        **layer_json(config),
        "architectures": [ARCHITECTURE_2 if second else ARCHITECTURE],
        "block_size": config.block_size,
        **causal_json(config),
        **output_json(config),
        DFLASH: {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.aux_layers), **own},
    }
    weights = {name.removesuffix(".weight") if name.startswith(_CODEBOOKS) else name: x for name, x in weights.items()}
    save_head(folder, written, weights, **options)


def causal_json(config: BlockConfig) -> dict[str, Any]:
    """Return the field for causality within the block, if it is not the default. Raises ConfigError for mixtures."""
    causal = config.causal or (False,) * config.num_hidden_layers
    if all_or_none(causal) == causal_by_type(config.windows, config.num_hidden_layers):
        return {}
    if len(set(causal)) > 1:
        raise ConfigError(f"a mixture of causal and other layers ({causal}) cannot be written")
    return {"is_causal": causal[0]}


def output_json(config: BlockConfig) -> dict[str, Any]:
    """Return the fields for scaled embeddings and logits, if they are not the target's."""
    return {
        **({} if config.embedding_scale is None else {"input_embedding_scale": config.embedding_scale}),
        **({} if config.output_multiplier == 1 else {"output_multiplier": config.output_multiplier}),
        **({} if config.logit_softcap is None else {"final_logit_softcapping": config.logit_softcap}),
    }


def holds_zlab(config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> bool:
    return is_of(config, ARCHITECTURE)


def holds_zlab_2(config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> bool:
    return is_of(config, ARCHITECTURE_2)
