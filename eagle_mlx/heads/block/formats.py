"""File layouts of block drafters: four with fields at the top level or in `dflash_config`, and that of speculators.

- z-lab, DFlash and DFlash2: without an embedding and an output projection of their own.
- DeepSpec (`Qwen3DSparkModel`), DSpark: with both; its `dflash_*_block7` are DSpark heads without a Markov head.
- SpecForge (`DSparkDraftModel`) and LiquidAI (`Lfm2DSparkDraftModel`), DSpark: with neither.
- Meta (`muse_glimmer_assistant`), DFlash under other names: embeddings and logits are the target's without its norm,
  scale and soft cap. Its windows reach to both sides of a slot, and no layer is causal.

Other windows end at each slot and include it. Layers with a window are causal within the block, unless `is_causal` or,
in z-lab's, `dflash_config.causal` say otherwise. DeepSpec's layers have no windows.

vllm-project/speculators has a separate config for the layers of DFlash and DSpark heads. Layer ids are one higher than
ours. A window counts the positions before the anchor, for all slots alike, and has no effect within the block. Layers
with a window are causal within the block unless `sliding_window_non_causal` is set. The output projection is in the
files only if the draft vocabulary is smaller than the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from eagle_mlx.errors import CheckpointError, ConfigError, check
from eagle_mlx.formats.fields import LAYER_DEFAULTS, of_class, quantization_json, reading, speculators_layer
from eagle_mlx.formats.tensors import HeadFolder, SaveOptions, Tensors, save_head, weights_of
from eagle_mlx.heads.base import Format, build, check_expressible, of_speculators, speculators_json, vocabulary_tensors
from eagle_mlx.heads.block import fields
from eagle_mlx.heads.block.fields import DFLASH, DSPARK, SHARED, all_or_none, causal_by_type
from eagle_mlx.heads.block.head import BlockHead, DFlash2Head, DFlashHead, DSparkHead
from eagle_mlx.heads.block.layers import BlockConfig

ZLAB, ZLAB_2 = "DFlashDraftModel", "DFlash2DraftModel"
DEEPSPEC, GEMMA = "Qwen3DSparkModel", "Gemma4DSparkModel"
SPECFORGE, LIQUID = "DSparkDraftModel", "Lfm2DSparkDraftModel"
MUSE = "muse_glimmer_assistant"
_IN_MUSE = {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"}
_MUSE_OUTPUT: dict[str, Any] = {"embedding_scale": 1.0, "output_multiplier": 1.0, "logit_softcap": 0.0}
_SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
_OF_ZLAB = (*SHARED, "causal", "input_embedding_scale", "output_multiplier", "final_logit_softcapping")
_OF_DSPARK = (*SHARED, *DSPARK, "target_model_type", "target_text_model_type")
_OF_GEMMA = (
    *("attention_k_eq_v", "global_head_dim", "num_global_key_value_heads", "final_logit_softcapping"),
    *("num_kv_shared_layers", "use_bidirectional_attention", "vocab_size_per_layer_input"),
)
_NO_ENDS = {"own_embedding": False, "own_lm_head": False, "first_slot_drafts": False}
_PLAIN_OUTPUT = {"embedding_scale": None, "output_multiplier": 1.0, "logit_softcap": None}

_IDS = "aux_hidden_state_layer_ids"
_OF_SPECULATORS = (*DSPARK, _IDS, "block_size", "mask_token_id", "sliding_window_non_causal", "max_anchors")


def load_zlab(files: HeadFolder) -> BlockHead:
    is_second = of_class(files.config, ZLAB_2)
    own = _SELECTOR if is_second else ()
    written = fields.flat_config(files.file, files.config, (*_OF_ZLAB, *own))
    with reading(files.file):
        selector: dict[str, Any] = {name: int(written[name]) for name in own}
        scale, softcap = written.get("input_embedding_scale"), written.get("final_logit_softcapping")
        config = BlockConfig(
            **_with_causality(written, files.target_layers),
            embedding_scale=None if scale is None else float(scale),
            output_multiplier=float(written.get("output_multiplier", 1.0)),
            logit_softcap=float(softcap) if softcap else None,
            **selector,
        )
    tensors = fields.block_tensors(files)
    tensors = {f"{name}.weight" if name in _CODEBOOKS else name: x for name, x in tensors.items()}
    return build(files.folder, DFlash2Head if is_second else DFlashHead, config, tensors)


def load_muse(files: HeadFolder) -> DFlashHead:
    """Make a head of its files. Its config has no vocabulary, which is the target's."""
    written = fields.flat_config(files.file, files.config, SHARED)
    with reading(files.file):
        size = written.get("vocab_size", files.target_vocab)
        check(size is not None, "vocab_size is missing; load the head with its target")
        check(not written.get("is_causal"), "is_causal is true; slots of Muse Glimmer's assistants see later ones")
        kinds = written.get("layer_types") or ["sliding_attention"] * int(written["num_hidden_layers"])
        shared = fields.shared_fields({**written, "vocab_size": size, "layer_types": kinds}, files.target_layers)
        config = BlockConfig(**shared, **_MUSE_OUTPUT, window_start="around")
    ours = {name: short for short, name in _IN_MUSE.items()}
    tensors = {_renamed(name, ours): x for name, x in fields.block_tensors(files).items()}
    return build(files.folder, DFlashHead, config, tensors, partial(_renamed, names=_IN_MUSE))


def _renamed(tensor: str, names: Mapping[str, str]) -> str:
    """Return a tensor's name with its module renamed if `names` has the module."""
    module, dot, last = tensor.rpartition(".")
    return f"{names.get(module, module)}{dot}{last}"


def load_deepspec(files: HeadFolder) -> DSparkHead:
    """Make a DSpark head of its files. Unknown fields only give a warning: DeepSpec copies the target's config."""
    written, own = files.config, {}
    if of_class(written, GEMMA):
        with reading(files.file):
            written, own = fields.as_qwen3(written), fields.gemma_fields(written)
    else:  # the factor is the target's; DeepSpec's attention turns whole heads
        rope = {**(written.get("rope_parameters") or {}), "partial_rotary_factor": None}
        written = {**written, "rope_parameters": rope, "partial_rotary_factor": None}
    written = fields.flat_config(files.file, written, (*_OF_DSPARK, *_OF_GEMMA), strict=False)
    with reading(files.file):
        shared = {**fields.shared_fields(written, files.target_layers), **own}
        check(not shared["windows"], "a layer slides; DeepSpec trains layers with full attention")
        return _dspark(files, written, shared)


def load_specforge(files: HeadFolder) -> DSparkHead:
    written = fields.flat_config(files.file, files.config, (*_OF_DSPARK, "projector_type"))
    if (projector := written.get("projector_type", "dspark")) != "dspark":
        raise CheckpointError(f"{files.file} sets {DFLASH}.projector_type to {projector!r}; only dspark is known")
    with reading(files.file):
        return _dspark(files, written, _with_causality(written, files.target_layers))


def _dspark(files: HeadFolder, written: Mapping[str, Any], shared: dict[str, Any]) -> DSparkHead:
    tensors, first = fields.block_tensors(files), bool(written.get("sample_from_anchor", True))
    own = {**fields.dspark_fields(written, tensors), **fields.own_ends(tensors)}
    return build(files.folder, DSparkHead, BlockConfig(**shared, **own, first_slot_drafts=first), tensors)


def _with_causality(config: Mapping[str, Any], target_layers: int | None) -> dict[str, Any]:
    """Return the shared fields and `causal`, which `is_causal`, else `causal`, sets for all layers."""
    shared = fields.shared_fields(config, target_layers)
    layers, flag = shared["num_hidden_layers"], config.get("is_causal", config.get("causal"))
    by_type = causal_by_type(shared["windows"], layers)
    return {**shared, "causal": by_type if flag is None else all_or_none((bool(flag),) * layers)}


def save_zlab(head: DFlashHead | DFlash2Head, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    config, second, weights = head.config, isinstance(head, DFlash2Head), weights_of(head)
    fields.check_block_expressible(
        config, "z-lab's", conv_kernel_size=config.conv_kernel_size, **_NO_ENDS, window_start="slot"
    )
    own = {name: getattr(config, name) for name in _SELECTOR} if second else {}
    output = {
        "input_embedding_scale": config.embedding_scale,
        "output_multiplier": None if config.output_multiplier == 1 else config.output_multiplier,
        "final_logit_softcapping": config.logit_softcap,
    }
    placed = {
        "architectures": [ZLAB_2 if second else ZLAB],
        "block_size": config.block_size,
        **_causal_json(config),
        **{name: value for name, value in output.items() if value is not None},
        DFLASH: {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.aux_layers), **own},
    }
    weights = {name.removesuffix(".weight") if name.startswith(_CODEBOOKS) else name: x for name, x in weights.items()}
    _write(head, folder, placed, weights, options)


def save_muse(head: DFlashHead, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    config, whose = head.config, "Muse Glimmer's"
    fields.check_block_expressible(config, whose, **_MUSE_OUTPUT, **_NO_ENDS, window_start="around", causal=())
    placed = {**_block_json(config), "architectures": ["MuseGlimmerAssistantModel"], "model_type": MUSE}
    _write(head, folder, placed, {_renamed(name, _IN_MUSE): x for name, x in weights_of(head).items()}, options)


def save_deepspec(head: DSparkHead, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    config = head.config
    scaled = {"gemma": True, "output_multiplier": 1.0, "embedding_scale": config.hidden_size**0.5}
    output = scaled if config.gemma else _PLAIN_OUTPUT
    fields.check_block_expressible(config, "DeepSpec's", windows=(), causal=(), interleaved_rope=False, **output)
    placed = {**_block_json(config), **fields.dspark_json(config), "architectures": [DEEPSPEC]}
    if config.gemma:
        placed |= {**fields.gemma_json(config), "architectures": [GEMMA]}
    _write(head, folder, placed, weights_of(head), options)


def save_specforge(head: DSparkHead, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    config = head.config
    fields.check_block_expressible(config, "SpecForge's", **_PLAIN_OUTPUT, window_start="slot")
    nested = {**_block_json(config), **fields.dspark_json(config), "projector_type": "dspark"}
    placed = {"architectures": [SPECFORGE], "block_size": config.block_size, **_causal_json(config), DFLASH: nested}
    _write(head, folder, placed, weights_of(head), options)


def _block_json(config: BlockConfig) -> dict[str, Any]:
    layers = list(config.aux_layers)
    return {"block_size": config.block_size, "mask_token_id": config.mask_token_id, "target_layer_ids": layers}


def _write(
    head: BlockHead, folder: str | Path, placed: Mapping[str, Any], weights: Tensors, options: SaveOptions
) -> None:
    config = head.config
    check_expressible(config, "this", "choose another layout", draft_vocab_size=config.vocab_size)
    written = {**fields.block_layer_json(config), **quantization_json(config.quantization), **placed}
    save_head(folder, written, weights, **options)


def _causal_json(config: BlockConfig) -> dict[str, Any]:
    """Return the field for causality within the block, if it is not the default. Raises ConfigError for mixtures."""
    causal = config.causal or (False,) * config.num_hidden_layers
    if all_or_none(causal) == causal_by_type(config.windows, config.num_hidden_layers):
        return {}
    check(len(set(causal)) == 1, f"a mixture of causal and other layers ({causal}) cannot be written")
    return {"is_causal": any(causal)}


def load_speculators_block(files: HeadFolder) -> BlockHead:
    written = fields.flat_config(files.file, files.config, _OF_SPECULATORS)
    layer = fields.flat_config(files.file, speculators_layer(files.file, written, "qwen3"), ())
    tensors, is_dspark = fields.block_tensors(files), written["speculators_model_type"] == "dspark"
    with reading(files.file):
        own: dict[str, Any] = {
            name: written[name] for name in ("block_size", "mask_token_id", "quantization") if name in written
        }
        own["target_layer_ids"] = [k - 1 for k in written.get(_IDS, ())]
        shared = fields.shared_fields({**LAYER_DEFAULTS["qwen3"], **layer, **own}, files.target_layers)
        width, size = written.get("target_hidden_size"), shared["hidden_size"]
        check(width in (None, size), f"target_hidden_size is {width} but hidden_size {size}")
        shared["draft_vocab_size"] = int(written.get("draft_vocab_size") or shared["vocab_size"])
        by_type = causal_by_type(shared["windows"], shared["num_hidden_layers"])
        config = BlockConfig(
            **shared,
            **fields.own_ends(tensors),
            **(fields.dspark_fields(written, tensors) if is_dspark else {}),
            causal=() if written.get("sliding_window_non_causal") else by_type,
            window_start="anchor" if shared["windows"] else "slot",
            first_slot_drafts=_first_slot_drafts(written, shared["block_size"]),
        )
    return build(files.folder, DSparkHead if is_dspark else DFlashHead, config, tensors)


def _first_slot_drafts(config: Mapping[str, Any], block_size: int) -> bool:
    """Return whether the first slot drafts: in old files, whether there are as many speculative tokens as slots."""
    if "sample_from_anchor" in config:
        return bool(config["sample_from_anchor"])
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return bool(methods[0].get("speculative_tokens") == block_size)


def save_speculators_block(head: BlockHead, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    """Write a head (`Format.save`). Other servers read embedding and projection in the `base_model`. `depth` is not
    used: readers tell by the number of speculative tokens which slot drafts first."""
    config = head.config
    kind = "dspark" if isinstance(head, DSparkHead) else "dflash"
    _check_expressible(config)
    layer = fields.block_layer_json(config)
    del layer["rope_theta"]
    written = {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        **speculators_json(kind, {**options, "depth": config.drafts}),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        _IDS: [k + 1 for k in config.aux_layers],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None,
        "sample_from_anchor": config.first_slot_drafts,
        "sliding_window_non_causal": bool(config.windows) and not config.causal,
        "transformer_layer_config": layer,
        **(fields.dspark_json(config) if kind == "dspark" else {}),
        **quantization_json(config.quantization),
    }
    save_head(folder, written, weights_of(head), exact=vocabulary_tensors(head), **options)


def _check_expressible(config: BlockConfig) -> None:
    ends = {"own_embedding": False, "own_lm_head": config.draft_vocab_size < config.vocab_size}
    windows = {"window_start": "anchor"} if config.windows else {}
    fields.check_block_expressible(config, "speculators'", **_PLAIN_OUTPUT, interleaved_rope=False, **ends, **windows)
    by_type = causal_by_type(config.windows, config.num_hidden_layers)
    if all_or_none(config.causal) not in ((), by_type):
        raise ConfigError(f"speculators' layout cannot express causal={config.causal}; choose another layout")


def _holds(*classes: str) -> Callable[[Mapping[str, Any], object], bool]:
    return lambda config, _: of_class(config, *classes)


def _refused_by(head: BlockHead) -> tuple[str, ...]:
    """Return vLLM for Markov heads that it does not have."""
    return () if head.config.markov_head in (None, "vanilla") else ("vLLM",)


def _of_speculators(kind: str, title: str) -> Format:
    about, readers = f"{title}, as speculators writes it", ("speculators", "vLLM")
    return Format("speculators", about, readers, of_speculators(kind), *_SPECULATORS)


_ZLAB, _ZLAB_2 = (_holds(ZLAB), load_zlab, save_zlab), (_holds(ZLAB_2), load_zlab, save_zlab)
_DEEPSPEC = _holds(DEEPSPEC, GEMMA), load_deepspec, save_deepspec, False, _refused_by
_SPECULATORS = load_speculators_block, save_speculators_block, False, _refused_by
_SPECFORGE = _holds(SPECFORGE, LIQUID), load_specforge, save_specforge
_MUSE = (lambda config, _: config.get("model_type") == MUSE), load_muse, save_muse
DFLASH_FORMATS = (
    Format("dflash", "DFlash, as z-lab writes it", ("z-lab", "vLLM", "SGLang"), *_ZLAB),
    _of_speculators("dflash", "DFlash"),
    Format("muse", "DFlash, as Meta writes it for Muse Glimmer", ("mlx-vlm", "SGLang"), *_MUSE),
)
DFLASH2_FORMATS = (Format("dflash2", "DFlash2, as z-lab writes it", ("z-lab", "SGLang"), *_ZLAB_2),)
DSPARK_FORMATS = (
    Format("dspark", "DSpark, as DeepSpec writes it", ("DeepSpec", "vLLM", "SGLang"), *_DEEPSPEC),
    _of_speculators("dspark", "DSpark"),
    Format("specforge", "DSpark, as SpecForge writes it", ("SpecForge", "SGLang"), *_SPECFORGE),
)
