"""File layouts of EAGLE-3 and P-EAGLE heads: the portable one, and that of vllm-project/speculators.

SafeAILab, SpecForge, AngelSlim, TorchSpec, Model-Optimizer, DeepSpec and SGLang use the portable layout. The first
layer is `midlayer.*` or `layers.0.*`; `d2t` (int64 offsets) and `t2d` (bool) are there if the draft vocabulary is
smaller than the target's. Layer ids are written twice: in `eagle_config` as the output of layer k from 0 (SGLang,
SpecForge), and at the top level as k + 1 (vLLM). DeepSpec names them `target_layer_ids`, from 0.

P-EAGLE has EAGLE-3's tensors with `mask_hidden`, and the id of the mask token in the config. SpecForge
(`PEagleDraftModel`), NeMo AutoModel (`parallel_drafting`) and Amazon (`ptd_token_id`) write it. Sources: SpecForge's
`modeling/draft/peagle.py`; NeMo's `speculative/eagle/peagle_draft.py`; aws-neuron/nkipy, which reads
amazon/GPT-OSS-20B-P-EAGLE; vLLM's `llama_eagle3.py`, which flattens `mask_hidden`.

speculators has a separate config for the layer; its missing fields have the defaults of transformers.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, Unpack

import mlx.core as mx

from eagle_mlx.errors import CheckpointError, ConfigError, check
from eagle_mlx.formats import fields
from eagle_mlx.formats.tensors import HeadFolder, SaveOptions, layer_width, save_head, weights_of, with_embedding
from eagle_mlx.heads.base import Format, build, check_expressible, of_speculators, speculators_json, vocabulary_tensors
from eagle_mlx.heads.eagle3.head import Eagle3Config, Eagle3Head, PEagleConfig, PEagleHead, default_aux_layers
from eagle_mlx.heads.layers import layer_json, llama_json

ARCHITECTURE, PEAGLE = "LlamaForCausalLMEagle3", "PEagleDraftModel"
DEEPSPEC, GEMMA = "Qwen3Eagle3Model", "Gemma4Eagle3Model"
_OF_DEEPSPEC = (
    *("target_layer_ids", "num_target_layers", "target_model_name_or_path"),
    *("ttt_length", "step_loss_decay", "draft_num_hidden_layers"),
)
_MOST_LAYERS = 8
"""Published heads have up to four layers. A config that states more has its target's number."""
_LAYER = re.compile(r"^layers\.(\d+)\.")
_NESTED = {fields.LAYER_IDS, "use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"}
_NESTED_HARMLESS = {"use_mtp_layernorm": (False,), "next_layer_regular": (True,), "parallel_draft_step": (None, 0, 1)}
"""Unsupported flags of Model-Optimizer in eagle_config, with the values that have no effect."""
_MASK_TOKEN = ("mask_token_id", "ptd_token_id", "pard_token")
"""The names of the mask token's id; vLLM reads the last two."""
_OF_PEAGLE = ("parallel_drafting", "num_depths", "num_aux_hidden_states")
_FIELDS = (
    *("draft_vocab_size", "target_hidden_size"),
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
)
"""The fields that are written as they are."""


def save_eagle3(head: Eagle3Head, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    tensors = {outer_name(name): value for name, value in weights_of(head).items()}
    save_head(folder, _portable_json(head.config), tensors | vocabulary_tensors(head), **options)


def load_eagle3(files: HeadFolder) -> Eagle3Head:
    config, tensors = dict(files.config), inner_tensors(files.folder, files.tensors)
    mask = take_mask_token(files.file, config) if holds_peagle(files.config, files.tensors) else None
    if mask is not None:
        config = {name: value for name, value in config.items() if name not in _OF_PEAGLE}
    made = _read_portable(files, config, tensors)
    if not made.norm_logits and not made.norm_output:
        tensors.pop("norm.weight", None)  # present, but untrained and unused
    return _build(files, made, tensors, mask)


def _build(files: HeadFolder, config: Eagle3Config, tensors: dict[str, mx.array], mask: int | None) -> Eagle3Head:
    """Return the head for the config of its layers and its tensors; a P-EAGLE head if it has a mask token."""
    if mask is None:
        return build(files.folder, Eagle3Head, config, tensors, outer_name)
    if "mask_hidden" not in tensors:
        raise CheckpointError(f"{files.folder} lacks mask_hidden, without which mask tokens would read noise")
    with fields.reading(files.file):
        own = {field.name: getattr(config, field.name) for field in fields_of(config)}
        config = PEagleConfig(**own, mask_token_id=mask)
    tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    return build(files.folder, PEagleHead, config, tensors, outer_name)


def inner_tensors(where: Path, tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return tensors by an Eagle3Head's parameter names; the first layer may be named `midlayer` or `layers.0`."""
    inner: dict[str, mx.array] = {}
    for name, value in tensors.items():
        short = name.replace("layers.0.", "midlayer.") if name.startswith("layers.0.") else name
        short = _LAYER.sub(lambda layer: f"layers.{int(layer[1]) - 1}.", short)
        if short in inner:
            raise CheckpointError(f"{where} has {short} twice, once as {name}; keep one of them")
        inner[short] = value
    return inner


def outer_name(name: str) -> str:
    """Return the name in a file of an Eagle3Head's parameter."""
    return _LAYER.sub(lambda layer: f"layers.{int(layer[1]) + 1}.", name)


def _portable_json(config: Eagle3Config) -> dict[str, Any]:
    is_parallel, layers = isinstance(config, PEagleConfig), list(config.aux_layers)
    written = llama_json(config, PEAGLE if is_parallel else ARCHITECTURE)
    del written["aux_layers"], written["norm_logits"]
    with_aux, first_norm = written.pop("use_aux_hidden_state"), written.pop("input_layernorm")
    nested: dict[str, Any] = {"use_aux_hidden_state": with_aux}
    if layers:
        written[fields.LAYER_IDS] = [k + 1 for k in layers]
        nested[fields.LAYER_IDS] = layers
    if not (first_norm and config.norm_logits):
        nested |= {"use_input_layernorm_in_first_layer": first_norm, "use_last_layernorm": config.norm_logits}
    if config.hidden_norm == with_aux:
        del written["hidden_norm"]
    if is_parallel:
        written |= {"parallel_drafting": True, "pard_token": written["mask_token_id"]}
    return {**written, "eagle_config": nested}


def _read_portable(files: HeadFolder, config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> Eagle3Config:
    file = files.file
    is_plain = not files.prefixed and any(name.startswith("midlayer.") for name in files.tensors)
    by_specforge = is_plain and "norm_before_residual" not in config
    config = _with_own_layers(_of_deepspec(file, config), tensors)
    nested = config.get("eagle_config") or {}
    fields.refuse(file, config)
    fields.warn_of_unknown(file, config)
    _check_nested(file, nested)
    ids = nested.get(fields.LAYER_IDS), config.get(fields.LAYER_IDS)
    with_aux = bool(nested.get("use_aux_hidden_state", True))
    with fields.reading(file):
        values = fields.layer_fields(config)
        recycled, normed = _norm_output(config, nested, tensors, by_specforge)
        return Eagle3Config(
            **values,
            draft_vocab_size=int(config.get("draft_vocab_size") or config["vocab_size"]),
            target_hidden_size=int(config.get("target_hidden_size") or values["hidden_size"]),
            aux_layers=aux_layers_of(files, *ids) if with_aux else (),
            norm_before_residual=bool(config.get("norm_before_residual", False)),
            qk_norm=_flag(config, "qk_norm", "midlayer.self_attn.q_norm.weight" in tensors),
            norm_before_fc=_flag(config, "norm_before_fc", "input_norm.weight" in tensors),
            fc_norm=_flag(config, "fc_norm", "fc_norm.0.weight" in tensors),
            norm_output=recycled,
            norm_logits=normed,
            input_layernorm=bool(nested.get("use_input_layernorm_in_first_layer", True)),
            hidden_norm=_flag(config, "hidden_norm", with_aux or "midlayer.hidden_norm.weight" in tensors),
            use_aux_hidden_state=with_aux,
            own_embedding="embed_tokens.weight" in tensors,
            quantization=fields.read_quantization(config),
        )


def _of_deepspec(file: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with DeepSpec's fields by the names of this layout. Raises CheckpointError for other layers."""
    if fields.of_class(config, GEMMA):
        raise CheckpointError(
            f"{file} describes a {GEMMA}; EAGLE-3 heads with Gemma 4's layer are not supported: use a DSpark head"
        )
    if not fields.of_class(config, DEEPSPEC):
        return config
    if config.get("num_hidden_layers") != 1:
        raise CheckpointError(f"{file} describes a {DEEPSPEC} of several layers; only one layer is supported")
    with fields.reading(file):
        ids = [k + 1 for k in config["target_layer_ids"]]
    return {**{name: value for name, value in config.items() if name not in _OF_DEEPSPEC}, fields.LAYER_IDS: ids}


def _with_own_layers(config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> Mapping[str, Any]:
    """Return a config with one layer if it states a model's number and the files have only the first.

    EAGLE3-Vicuna's config states the 40 layers of its target.
    """
    stated = config.get("num_hidden_layers")
    is_models = isinstance(stated, int) and stated > _MOST_LAYERS
    has_others = any(name.startswith("layers.") for name in tensors)
    return {**config, "num_hidden_layers": 1} if is_models and not has_others else config


def _flag(config: Mapping[str, Any], name: str, otherwise: bool) -> bool:
    value = config.get(name)
    return otherwise if value is None else bool(value)


def _check_nested(file: Path, nested: Mapping[str, Any]) -> None:
    for name, value in nested.items():
        if name in _NESTED or value in _NESTED_HARMLESS.get(name, ()):
            continue
        why = "not implemented" if name in _NESTED_HARMLESS else "not known, and might change the drafts"
        raise CheckpointError(f"{file} sets eagle_config.{name} to {value!r}, which is {why}")


def _norm_output(
    config: Mapping[str, Any], nested: Mapping[str, Any], tensors: Mapping[str, mx.array], by_specforge: bool
) -> tuple[bool, bool]:
    """Return whether the next step reads the normed output, and whether lm_head does.

    In SpecForge's files, unlike all others, `norm_output` means only the latter. They can be recognized by `midlayer`
    without a prefix, and by the absence of `norm_before_residual`. If such a file sets the flag to false although the
    norm was trained, it is not SpecForge's, and lm_head reads the normed output.
    """
    flag = config.get("norm_output")
    normed = bool(nested.get("use_last_layernorm", True))
    if flag is None or not by_specforge or "eagle_mlx" in config:
        return bool(flag), normed
    norm = tensors.get("norm.weight")
    trained = norm is not None and not bool(mx.all(norm == 1).item())
    return False, normed and (bool(flag) or trained)


def aux_layers_of(files: HeadFolder, nested: Any, top: Any) -> tuple[int, ...]:
    """Return layer ids as outputs counted from 0, as in `nested`; those in `top` are one higher.

    Without them, as in the empty list of Model-Optimizer, return the default ones for the target's number of layers.
    Raises CheckpointError, also if neither is known, and TypeError.
    """
    file, target_layers = files.file, files.target_layers
    from_top = None if top is None else [k - 1 for k in top]
    if nested and from_top and list(nested) != from_top:
        raise CheckpointError(
            f"{file} names different layers in eagle_config ({nested}: outputs, from 0) and at the top level ({top}: "
            "outputs plus one); keep the one that the head was trained with"
        )
    layers = nested or from_top
    if not layers:
        if target_layers is None:
            raise CheckpointError(f"{file} does not name the layers that the head reads; load the head with its target")
        return default_aux_layers(target_layers)
    if any(k < 0 for k in layers):
        raise CheckpointError(f"{file} names the embedding's output as an aux layer, which is not supported")
    return tuple(map(operator.index, layers))


def is_portable(config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> bool:
    """Return whether files are in this layout: a `midlayer`, or a first layer wider than the head."""
    first, width = layer_width(config, tensors, "midlayer"), layer_width(config, tensors, "layers.0")
    has_layer = first is not None or width not in (None, config.get("hidden_size"))
    return has_layer and config.get("speculators_model_type") is None


def holds_peagle(config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> bool:
    is_named = fields.of_class(config, PEAGLE) or bool(config.get("parallel_drafting"))
    return is_portable(config, tensors) and (is_named or "mask_hidden" in tensors)


def take_mask_token(file: Path, config: dict[str, Any]) -> int:
    """Remove the id of the mask token from a config and return it. Raises CheckpointError without a single one."""
    given = {name: config.pop(name) for name in _MASK_TOKEN if config.get(name) is not None}
    with fields.reading(file):
        ids = {int(value) for value in given.values()}
    if len(ids) > 1:
        raise CheckpointError(f"{file} names several mask tokens, {given}; keep the one that the head was trained with")
    if not ids:
        raise CheckpointError(f"{file} lacks mask_token_id; add the id of the token that the head was trained with")
    return ids.pop()


def load_speculators(files: HeadFolder) -> Eagle3Head:
    config, kind = dict(files.config), files.config.get("speculators_model_type")
    if kind not in ("eagle3", "peagle"):
        raise CheckpointError(f"{files.file} has speculators_model_type {kind}; it must be eagle3")
    tensors = {name: x for name, x in files.without_copy().items() if name not in fields.NOT_READ}
    tensors = inner_tensors(files.folder, tensors)
    mask = take_mask_token(files.file, config) if kind == "peagle" else None
    return _build(files, _read_speculators(files, config, tensors), tensors, mask)


def _read_speculators(files: HeadFolder, config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> Eagle3Config:
    file = files.file
    layer = fields.speculators_layer(file, config, "llama", "qwen3")
    kind = layer.get("model_type", "qwen3")
    fields.refuse(file, {**layer, "tie_word_embeddings": False})  # this field is about the verifier
    fields.warn_of_unknown(file, {**layer, **config})
    fields.refuse(file, {name: value for name, value in config.items() if name != "tie_word_embeddings"})
    with fields.reading(file):
        shape = fields.layer_fields({**fields.LAYER_DEFAULTS[kind], **_one_rope(layer)})
        size = shape["hidden_size"]
        if config.get("target_hidden_size") not in (None, size):
            raise ConfigError(f"target_hidden_size is {config['target_hidden_size']} but the head's own is {size}")
        return Eagle3Config(
            **shape,
            draft_vocab_size=int(config.get("draft_vocab_size") or 32000),
            target_hidden_size=size,
            aux_layers=aux_layers_of(files, None, config.get(fields.LAYER_IDS)),
            norm_before_residual=bool(config.get("norm_before_residual", True)),
            norm_before_fc=bool(config.get("norm_before_fc", False)),
            fc_norm=bool(config.get("fc_norm", False)),
            norm_output=bool(config.get("norm_output", False)),
            qk_norm=kind == "qwen3",
            own_embedding="embed_tokens.weight" in tensors,
        )


def _one_rope(layer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Use the parameters of sliding layers if they differ by type of layer, as speculators does."""
    by_type = layer.get("rope_parameters")
    if isinstance(by_type, dict) and "sliding_attention" in by_type:
        return {**layer, "rope_parameters": by_type["sliding_attention"]}
    return layer


def save_speculators(head: Eagle3Head, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    """Write a head (`Format.save`) with an embedding; without one, speculators would draft with uninitialized memory.

    Raises HeadError if there is neither an embedding nor a target.
    """
    config = head.config
    _check_expressible(config)
    weights, noted = with_embedding(head)
    mask = {"mask_token_id": config.mask_token_id} if isinstance(config, PEagleConfig) else {}
    written = {
        "architectures": ["PEagleSpeculator" if mask else "Eagle3Speculator"],
        **speculators_json("peagle" if mask else "eagle3", options),
        **mask,
        **{name: getattr(config, name) for name in _FIELDS},
        "embed_requires_grad": False,
        fields.LAYER_IDS: [k + 1 for k in config.aux_layers],
        "transformer_layer_config": _layer_json(config),
    }
    tensors = {outer_name(name).replace("midlayer.", "layers.0."): value for name, value in weights.items()}
    save_head(folder, written, tensors | vocabulary_tensors(head), noted, **options)


def _check_expressible(config: Eagle3Config) -> None:
    fields.window_json(config.windows)
    fixed = ("norm_logits", "input_layernorm", "hidden_norm", "use_aux_hidden_state", "qkv_bias", "quantization")
    usual = {name: getattr(Eagle3Config, name) for name in fixed}
    check_expressible(config, "the speculators", "write the portable layout", **usual)
    own, its = config.hidden_size, config.target_hidden_size
    check(own == its, f"speculators needs heads of their target's width, {its}, not {own}; write the portable layout")
    if config.qk_norm and config.mlp_bias:
        raise ConfigError("speculators has no layer with both q/k norms and mlp_bias; write the portable layout")


def _layer_json(config: Eagle3Config) -> dict[str, Any]:
    if not config.qk_norm:
        return {"model_type": "llama", **layer_json(config), "mlp_bias": config.mlp_bias}
    sliding = {"use_sliding_window": True, "max_window_layers": 0} if config.windows else {}
    return {"model_type": "qwen3", **layer_json(config), **sliding}


def _holds_speculators(config: Mapping[str, Any], _: object) -> bool:
    """Return whether the files are an EAGLE-3 head in speculators' format. Loading an unknown type raises an error."""
    return config.get("speculators_model_type") not in (None, "mtp", "dflash", "dspark", "peagle")


def _refused_by(head: Eagle3Head) -> tuple[str, ...]:
    """Return SGLang for heads with several layers."""
    return ("SGLang",) if head.cache_layers > 1 else ()


_ABOUT = "portable EAGLE-3, as SafeAILab and SpecForge write it"
_PORTABLE, _SPECULATORS = (load_eagle3, save_eagle3), (load_speculators, save_speculators)
_READERS = ("speculators", "vLLM")
EAGLE3_FORMATS = (
    Format("eagle3", _ABOUT, ("SGLang", "vLLM", "SpecForge"), is_portable, *_PORTABLE, refused_by=_refused_by),
    Format("speculators", "speculators", _READERS, _holds_speculators, *_SPECULATORS, has_embedding=True),
)
_ABOUT_PEAGLE, _holds_peagle_speculators = "P-EAGLE, as speculators writes it", of_speculators("peagle")
PEAGLE_FORMATS = (
    Format("peagle", "P-EAGLE, as SpecForge writes it", ("SpecForge", "vLLM"), holds_peagle, *_PORTABLE),
    Format("speculators", _ABOUT_PEAGLE, _READERS, _holds_peagle_speculators, *_SPECULATORS, has_embedding=True),
)
