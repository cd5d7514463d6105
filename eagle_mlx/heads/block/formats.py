"""File layouts of block drafters: three with fields at the top level or in `dflash_config`, and that of speculators.

- z-lab, DFlash and DFlash2: without an embedding and an output projection of their own.
- DeepSpec (`Qwen3DSparkModel`), DSpark: with both; its `dflash_*_block7` are DSpark heads without a Markov head.
- SpecForge (`DSparkDraftModel`) and LiquidAI (`Lfm2DSparkDraftModel`), DSpark: with neither.

A window ends at each slot and includes it. Layers with a window are causal within the block, unless `is_causal` or, in
z-lab's, `dflash_config.causal` say otherwise. DeepSpec's layers have no windows.

vllm-project/speculators has a separate config for the layers of DFlash and DSpark heads. Layer ids are one higher than
ours. A window counts the positions before the anchor, for all slots alike, and has no effect within the block. Layers
with a window are causal within the block unless `sliding_window_non_causal` is set. The output projection is in the
files only if the draft vocabulary is smaller than the target's.
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
    DFLASH,
    DSPARK,
    SHARED,
    TRAINING,
    all_or_none,
    as_qwen3,
    block_layer_json,
    causal_by_type,
    check_block_expressible,
    dspark_fields,
    dspark_json,
    flat_config,
    gemma_fields,
    gemma_json,
    own_ends,
    read_block_weights,
    shared_fields,
)
from eagle_mlx.heads.block.head import BlockHead, DFlash2Head, DFlashHead, DSparkHead
from eagle_mlx.heads.eagle3.speculators import LAYER_DEFAULTS, NOT_READ
from eagle_mlx.heads.kinds import Format, of_class, of_speculators

ZLAB, ZLAB_2 = "DFlashDraftModel", "DFlash2DraftModel"
DEEPSPEC, GEMMA = "Qwen3DSparkModel", "Gemma4DSparkModel"
SPECFORGE, LIQUID = "DSparkDraftModel", "Lfm2DSparkDraftModel"
holds_zlab, holds_zlab_2 = of_class(ZLAB), of_class(ZLAB_2)
holds_deepspec, holds_specforge = of_class(DEEPSPEC, GEMMA), of_class(SPECFORGE, LIQUID)

_SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
_OF_ZLAB = (*SHARED, *TRAINING, "causal", "input_embedding_scale", "output_multiplier", "final_logit_softcapping")
_OF_DSPARK = (*SHARED, *DSPARK, *TRAINING, "target_model_type", "target_text_model_type")
_OF_GEMMA = (
    *("attention_k_eq_v", "global_head_dim", "num_global_key_value_heads", "final_logit_softcapping"),
    *("num_kv_shared_layers", "use_bidirectional_attention", "vocab_size_per_layer_input"),
)
_PLAIN_OUTPUT = {"embedding_scale": None, "output_multiplier": 1.0, "logit_softcap": None}

_IDS = "aux_hidden_state_layer_ids"
_OF_SPECULATORS = (*TRAINING, *DSPARK, _IDS, "block_size", "mask_token_id", "sliding_window_non_causal", "max_anchors")
_CLASSES: dict[str, type[BlockHead]] = {"dflash": DFlashHead, "dspark": DSparkHead}
_SAVED_CLASSES = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}


def load_zlab(folder: Path, target_layers: int | None = None) -> BlockHead:
    """Read a DFlash or DFlash2 head (`Format.load`)."""
    file, written = folder / "config.json", read_config(folder)
    second = holds_zlab_2(written, {})
    own = _SELECTOR if second else ()
    written = flat_config(file, written, (*_OF_ZLAB, *own))
    with reading(file):
        selector: dict[str, Any] = {name: int(written[name]) for name in own}
        scale, softcap = written.get("input_embedding_scale"), written.get("final_logit_softcapping")
        config = BlockConfig(
            **_with_causality(written, target_layers),
            embedding_scale=None if scale is None else float(scale),
            output_multiplier=float(written.get("output_multiplier", 1.0)),
            logit_softcap=float(softcap) if softcap else None,
            **selector,
        )
    tensors = read_block_weights(folder)
    tensors = {f"{name}.weight" if name in _CODEBOOKS else name: x for name, x in tensors.items()}
    return build(folder, DFlash2Head if second else DFlashHead, config, tensors)


def load_deepspec(folder: Path, target_layers: int | None = None) -> DSparkHead:
    """Read a DSpark head. Unknown fields of the top level only give a warning: DeepSpec copies the target's config."""
    file, written = folder / "config.json", read_config(folder)
    own: dict[str, Any] = {}
    if of_class(GEMMA)(written, {}):
        with reading(file):
            written, own = as_qwen3(written), gemma_fields(written)
    else:  # the factor is the target's; DeepSpec's attention turns whole heads
        rope = written.get("rope_parameters") or {}
        written["rope_parameters"] = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
        written.pop("partial_rotary_factor", None)
    written = flat_config(file, written, (*_OF_DSPARK, *_OF_GEMMA), strict=False)
    tensors = read_block_weights(folder)
    with reading(file):
        fields = {**shared_fields(written, target_layers), **own}
        if fields["windows"]:
            raise ConfigError("a layer slides; DeepSpec trains layers with full attention")
        first = bool(written.get("sample_from_anchor", True))
        config = BlockConfig(**fields, **dspark_fields(written, tensors), **own_ends(tensors), first_slot_drafts=first)
    return build(folder, DSparkHead, config, tensors)


def load_specforge(folder: Path, target_layers: int | None = None) -> DSparkHead:
    """Read a DSpark head of SpecForge's or LiquidAI's."""
    file = folder / "config.json"
    written = flat_config(file, read_config(folder), (*_OF_DSPARK, "projector_type"))
    if (projector := written.get("projector_type", "dspark")) != "dspark":
        raise CheckpointError(f"{file} sets {DFLASH}.projector_type to {projector!r}; only dspark is known")
    tensors = read_block_weights(folder)
    with reading(file):
        config = BlockConfig(
            **_with_causality(written, target_layers),
            **dspark_fields(written, tensors),
            **own_ends(tensors),
            first_slot_drafts=bool(written.get("sample_from_anchor", True)),
        )
    return build(folder, DSparkHead, config, tensors)


def _with_causality(config: Mapping[str, Any], target_layers: int | None) -> dict[str, Any]:
    """Return the shared fields and `causal`, which `is_causal`, else `causal`, sets for all layers."""
    fields = shared_fields(config, target_layers)
    layers, said = fields["num_hidden_layers"], config.get("is_causal", config.get("causal"))
    by_type = causal_by_type(fields["windows"], layers)
    return {**fields, "causal": by_type if said is None else all_or_none((bool(said),) * layers)}


def save_zlab(head: DFlashHead | DFlash2Head, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    """Write a head in z-lab's layout (`Format.save`)."""
    config, second, weights = head.config, isinstance(head, DFlash2Head), weights_of(head)
    ends = {"own_embedding": False, "own_lm_head": False, "first_slot_drafts": False}
    check_block_expressible(
        config, "z-lab's", conv_kernel_size=config.conv_kernel_size, **ends, **_windows_end_at_slots(config)
    )
    own = {name: getattr(config, name) for name in _SELECTOR} if second else {}
    output = {
        "input_embedding_scale": config.embedding_scale,
        "output_multiplier": None if config.output_multiplier == 1 else config.output_multiplier,
        "final_logit_softcapping": config.logit_softcap,
    }
    written = {
        **block_layer_json(config),
        "architectures": [ZLAB_2 if second else ZLAB],
        "block_size": config.block_size,
        **_causal_json(config),
        **{name: value for name, value in output.items() if value is not None},
        DFLASH: {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.aux_layers), **own},
    }
    weights = {name.removesuffix(".weight") if name.startswith(_CODEBOOKS) else name: x for name, x in weights.items()}
    save_head(folder, written, weights, **options)


def save_deepspec(head: DSparkHead, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    """Write a head in DeepSpec's layout."""
    config = head.config
    scaled = {"gemma": True, "output_multiplier": 1.0, "embedding_scale": config.hidden_size**0.5}
    output = scaled if config.gemma else _PLAIN_OUTPUT
    check_block_expressible(config, "DeepSpec's", windows=(), causal=(), interleaved_rope=False, **output)
    placed = {**_block_json(config), **dspark_json(config), "architectures": [GEMMA if config.gemma else DEEPSPEC]}
    _write(head, folder, placed | (gemma_json(config) if config.gemma else {}), options)


def save_specforge(head: DSparkHead, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    """Write a head in SpecForge's layout."""
    config = head.config
    check_block_expressible(config, "SpecForge's", **_PLAIN_OUTPUT, **_windows_end_at_slots(config))
    nested = {**_block_json(config), **dspark_json(config), "projector_type": "dspark"}
    placed = {"architectures": [SPECFORGE], "block_size": config.block_size, **_causal_json(config), DFLASH: nested}
    _write(head, folder, placed, options)


def _windows_end_at_slots(config: BlockConfig) -> dict[str, Any]:
    return {"window_start": "slot"} if config.windows else {}


def _block_json(config: BlockConfig) -> dict[str, Any]:
    layers = list(config.aux_layers)
    return {"block_size": config.block_size, "mask_token_id": config.mask_token_id, "target_layer_ids": layers}


def _write(head: BlockHead, folder: str | Path, placed: Mapping[str, Any], options: SaveOptions) -> None:
    config = head.config
    check_block_expressible(config, "this", draft_vocab_size=config.vocab_size, gemma=config.gemma)
    save_head(folder, {**block_layer_json(config), **placed}, weights_of(head), **options)


def _causal_json(config: BlockConfig) -> dict[str, Any]:
    """Return the field for causality within the block, if it is not the default. Raises ConfigError for mixtures."""
    causal = config.causal or (False,) * config.num_hidden_layers
    if all_or_none(causal) == causal_by_type(config.windows, config.num_hidden_layers):
        return {}
    if len(set(causal)) > 1:
        raise ConfigError(f"a mixture of causal and other layers ({causal}) cannot be written")
    return {"is_causal": causal[0]}


def load_speculators_block(folder: Path, target_layers: int | None = None) -> BlockHead:
    """Read a DFlash or DSpark head (`Format.load`)."""
    file = folder / "config.json"
    written = flat_config(file, read_config(folder), _OF_SPECULATORS)
    layer = written.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise CheckpointError(f"{file} lacks transformer_layer_config")
    if layer.get("model_type", "qwen3") != "qwen3":
        raise CheckpointError(f"{file} describes a layer of {layer['model_type']}; only qwen3 layers can be read")
    layer = flat_config(file, layer, ())
    tensors = read_block_weights(folder, NOT_READ)
    with reading(file):
        config = _from_json(written, layer, tensors, target_layers)
    return build(folder, _CLASSES[written["speculators_model_type"]], config, tensors)


def _from_json(
    config: Mapping[str, Any], layer: Mapping[str, Any], tensors: Mapping[str, mx.array], target_layers: int | None
) -> BlockConfig:
    own = {name: config[name] for name in ("block_size", "mask_token_id", "quantization") if name in config}
    own["target_layer_ids"] = [k - 1 for k in config.get(_IDS, ())]
    fields = shared_fields({**LAYER_DEFAULTS["qwen3"], **layer, **own}, target_layers)
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
    if "sample_from_anchor" in config:
        return bool(config["sample_from_anchor"])
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
    """Write a head (`Format.save`). `base_model` is the target for other servers, which read embedding and projection
    there. `depth` is not used: readers tell by the number of speculative tokens which slot drafts first."""
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
    ends = {"own_embedding": False, "own_lm_head": config.draft_vocab_size < config.vocab_size}
    windows = {"window_start": "anchor"} if config.windows else {}
    check_block_expressible(config, "speculators'", **_PLAIN_OUTPUT, interleaved_rope=False, **ends, **windows)
    by_type = causal_by_type(config.windows, config.num_hidden_layers)
    if all_or_none(config.causal) not in ((), by_type):
        raise ConfigError(f"speculators' layout cannot express causal={config.causal}; choose another layout")


def _of_speculators(kind: str, title: str) -> Format:
    about, readers = f"{title}, as speculators writes it", ("speculators", "vLLM")
    return Format("speculators", about, readers, of_speculators(kind), load_speculators_block, save_speculators_block)


DFLASH_FORMATS = (
    Format("dflash", "DFlash, as z-lab writes it", ("z-lab", "vLLM", "SGLang"), holds_zlab, load_zlab, save_zlab),
    _of_speculators("dflash", "DFlash"),
)
DFLASH2_FORMATS = (
    Format("dflash2", "DFlash2, as z-lab writes it", ("z-lab", "SGLang"), holds_zlab_2, load_zlab, save_zlab),
)
_DEEPSPEC = holds_deepspec, load_deepspec, save_deepspec
_SPECFORGE = holds_specforge, load_specforge, save_specforge
DSPARK_FORMATS = (
    Format("dspark", "DSpark, as DeepSpec writes it", ("DeepSpec", "vLLM", "SGLang"), *_DEEPSPEC),
    _of_speculators("dspark", "DSpark"),
    Format("specforge", "DSpark, as SpecForge writes it", ("SpecForge", "SGLang"), *_SPECFORGE),
)
