"""The portable EAGLE-3 layout of SafeAILab, SpecForge, AngelSlim, TorchSpec, Model-Optimizer, DeepSpec and SGLang.

A folder with config.json and weights. Tensors: `fc`, `midlayer.*` (or `layers.0.*`), further `layers.*`, `norm`,
`lm_head`; `d2t` (int64 offsets) and `t2d` (bool) if the draft vocabulary is smaller than the target's; and, depending
on flags, `embed_tokens`, `input_norm`, `fc_norm.*`, q/k norms and biases. Layer ids are written twice: in
`eagle_config` as the output of layer k from 0 (SGLang, SpecForge), and at the top level as k + 1 (vLLM). DeepSpec names
them `target_layer_ids`, from 0 (its `modeling/eagle3/qwen3`).

P-EAGLE has EAGLE-3's tensors with `mask_hidden`, and the id of the mask token in the config. SpecForge
(`PEagleDraftModel`), NeMo AutoModel (`parallel_drafting`) and Amazon (`ptd_token_id`) write it. Sources: SpecForge's
`modeling/draft/peagle.py`; NeMo's `speculative/eagle/peagle_draft.py`; aws-neuron/nkipy, which reads
amazon/GPT-OSS-20B-P-EAGLE; vLLM's `llama_eagle3.py`, which flattens `mask_hidden`.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import mlx.core as mx

from eagle_mlx.errors import CheckpointError
from eagle_mlx.formats import fields
from eagle_mlx.formats.tensors import SaveOptions, layer_width, read_weights, save_head, weights_of
from eagle_mlx.heads.base import build, vocabulary_tensors
from eagle_mlx.heads.eagle3.head import Eagle3Config, Eagle3Head, PEagleConfig, PEagleHead, default_aux_layers
from eagle_mlx.heads.kinds import of_class

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


def save_eagle3(head: Eagle3Head, folder: str | Path, **options: Unpack[SaveOptions]) -> None:
    """Write an EAGLE-3 or P-EAGLE head (`Format.save`)."""
    tensors = {outer_name(name): value for name, value in weights_of(head).items()}
    save_head(folder, _to_json(head.config), tensors | vocabulary_tensors(head), **options)


def load_eagle3(folder: Path, target_layers: int | None = None) -> Eagle3Head:
    """Read an EAGLE-3 head (`Format.load`). The first layer may be named `midlayer` or `layers.0`."""
    return build(folder, Eagle3Head, *read_eagle3(folder, fields.read_config(folder), target_layers), outer_name)


def read_eagle3(
    folder: Path, written: Mapping[str, Any], target_layers: int | None
) -> tuple[Eagle3Config, dict[str, mx.array]]:
    """Return the config of a head with `written` in its file, and its tensors by the names of an Eagle3Head."""
    raw = read_weights(folder)
    by_specforge = any(name.startswith("midlayer.") for name in raw) and "norm_before_residual" not in written
    tensors = inner_tensors(folder, raw)
    config = _from_json(folder, written, tensors, target_layers, by_specforge)
    if not config.norm_logits and not config.norm_output:
        tensors.pop("norm.weight", None)  # present, but untrained and unused
    return config, tensors


def inner_tensors(where: Path, tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Rename tensors to an Eagle3Head's parameter names. Raises CheckpointError if two get the same name."""
    inner: dict[str, mx.array] = {}
    for name, value in tensors.items():
        short = name.removeprefix("model.")
        if layer := _LAYER.match(short):
            index = int(layer[1])
            short = (f"layers.{index - 1}." if index else "midlayer.") + short[layer.end() :]
        if short in inner:
            raise CheckpointError(f"{where} has {short} twice, once as {name}; keep one of them")
        inner[short] = value
    return inner


def outer_name(name: str) -> str:
    """Return the name in a file of an Eagle3Head's parameter."""
    return _LAYER.sub(lambda layer: f"layers.{int(layer[1]) + 1}.", name)


def _to_json(config: Eagle3Config) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    layers = list(values.pop("aux_layers"))
    del values["own_embedding"], values["windows"], values["norm_logits"], values["quantization"]
    with_aux, first_norm = values.pop("use_aux_hidden_state"), values.pop("input_layernorm")
    nested = {**({fields.LAYER_IDS: layers} if layers else {}), "use_aux_hidden_state": with_aux}
    if not (first_norm and config.norm_logits):
        nested |= {"use_input_layernorm_in_first_layer": first_norm, "use_last_layernorm": config.norm_logits}
    if config.hidden_norm == with_aux:
        del values["hidden_norm"]
    parallel = isinstance(config, PEagleConfig)
    return {
        "architectures": [PEAGLE if parallel else ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **values,
        **({"parallel_drafting": True, "pard_token": values["mask_token_id"]} if parallel else {}),
        **fields.window_json(config.windows),
        **fields.quantization_json(config.quantization),
        **({fields.LAYER_IDS: [k + 1 for k in layers]} if layers else {}),
        "eagle_config": nested,
    }


def _from_json(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, mx.array],
    target_layers: int | None,
    by_specforge: bool,
) -> Eagle3Config:
    file = folder / "config.json"
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
            aux_layers=aux_layers_of(file, *ids, target_layers) if with_aux else (),
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
    if of_class(GEMMA)(config, {}):
        raise CheckpointError(
            f"{file} describes a {GEMMA}; EAGLE-3 heads with Gemma 4's layer are not supported: use a DSpark head"
        )
    if not of_class(DEEPSPEC)(config, {}):
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
    stated, one = config.get("num_hidden_layers"), not any(name.startswith("layers.") for name in tensors)
    return {**config, "num_hidden_layers": 1} if isinstance(stated, int) and stated > _MOST_LAYERS and one else config


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


def aux_layers_of(file: Path, nested: Any, top: Any, target_layers: int | None) -> tuple[int, ...]:
    """Return layer ids as outputs counted from 0, as in `nested`; those in `top` are one higher.

    Without them, as in the empty list of Model-Optimizer, return the default ones for the target's number of layers.
    Raises CheckpointError, also if neither is known, and TypeError.
    """
    from_top = None if top is None else [k - 1 for k in top]
    if nested and from_top and list(nested) != from_top:
        raise CheckpointError(
            f"{file} names different layers in eagle_config ({nested}: outputs, from 0) and at the top level ({top}: "
            "outputs plus one); keep the one that the head was trained with"
        )
    layers = nested or from_top
    if not layers and target_layers is None:
        raise CheckpointError(f"{file} does not name the layers that the head reads; load the head with its target")
    if not layers:
        return default_aux_layers(target_layers or 0)
    if any(k < 0 for k in layers):
        raise CheckpointError(f"{file} names the embedding's output as an aux layer, which is not supported")
    return tuple(map(operator.index, layers))


def is_portable(config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> bool:
    """Return whether files are in this layout: a `midlayer`, or a first layer wider than the head."""
    if config.get("speculators_model_type") is not None:
        return False
    first, width = layer_width(config, tensors, "midlayer"), layer_width(config, tensors, "layers.0")
    return first is not None or width not in (None, config.get("hidden_size"))


def holds_peagle(config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> bool:
    masked = any(name.removeprefix("model.") == "mask_hidden" for name in tensors)
    named = of_class(PEAGLE)(config, tensors) or bool(config.get("parallel_drafting"))
    return is_portable(config, tensors) and (masked or named)


def load_peagle(folder: Path, target_layers: int | None = None) -> PEagleHead:
    """Read a P-EAGLE head (`Format.load`)."""
    written = fields.read_config(folder)
    mask = take_mask_token(folder / "config.json", written)
    rest = {name: value for name, value in written.items() if name not in _OF_PEAGLE}
    return build_peagle(folder, *read_eagle3(folder, rest, target_layers), mask)


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


def build_peagle(folder: Path, plain: Eagle3Config, tensors: dict[str, mx.array], mask: int) -> PEagleHead:
    """Return the head for the config of its layers, its tensors, and the id of its mask token."""
    if "mask_hidden" not in tensors:
        raise CheckpointError(f"{folder} lacks mask_hidden, without which mask tokens would read noise")
    with fields.reading(folder / "config.json"):
        own = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
        config = PEagleConfig(**own, mask_token_id=mask)
    tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    return build(folder, PEagleHead, config, tensors, outer_name)
