"""The portable EAGLE-3 layout: what SafeAILab, SpecForge and SGLang write and read, and vLLM reads as well.

One folder with config.json and model.safetensors. Tensors: `fc`, `midlayer.*`, `norm`, `lm_head` and, where the draft
vocabulary is smaller than the target's, `d2t` (int64 offsets) and `t2d` (bool). Layer ids are written twice: nested
under `eagle_config` as the output of layer k from 0 (SGLang, SpecForge), and at the top as k + 1 (vLLM).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from eagle_mlx.errors import CheckpointError, ConfigError
from eagle_mlx.folders import new_folder
from eagle_mlx.formats.tensors import check_shapes, read_tensors, weights_of, write_tensors
from eagle_mlx.heads.eagle3 import Eagle3Config, Eagle3Head, default_aux_layers
from eagle_mlx.target import compute_dtype

ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_DTYPE_NAMES = {mx.bfloat16: "bfloat16", mx.float16: "float16", mx.float32: "float32"}


def save_eagle3(
    head: Eagle3Head,
    folder: str | Path,
    *,
    target_name: str | None = None,
    extra: Mapping[str, Any] | None = None,
    dtype: mx.Dtype = mx.bfloat16,
    overwrite: bool = False,
) -> None:
    """Write a head as a folder that appears whole or not at all.

    `target_name` and `extra` (any JSON) are kept under the key `eagle_mlx` of config.json, which other loaders ignore.
    Raises OutputError where the folder exists and `overwrite` is not set, or where it cannot be written.
    """
    config = {**_to_json(head.config), "torch_dtype": _DTYPE_NAMES[dtype]}
    config["eagle_mlx"] = {"target": target_name, **(extra or {})}
    tensors = {name: value.astype(dtype) for name, value in weights_of(head).items()}
    if head.d2t is not None:
        offsets = np.array(head.d2t, np.int64)
        t2d = np.zeros(head.config.vocab_size, np.bool_)
        t2d[np.arange(len(offsets)) + offsets] = True
        tensors |= {"d2t": mx.array(offsets), "t2d": mx.array(t2d)}
    mx.eval(tensors)
    with new_folder(folder, overwrite) as part:
        write_tensors(part / "model.safetensors", tensors)
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_eagle3(folder: str | Path, target_layers: int | None = None) -> Eagle3Head:
    """Read a head; tensors may carry the prefix `model.`.

    `target_layers` (the target's number of layers) decides the aux layers of a config that names none, as SafeAILab's
    code does. Raises CheckpointError for a folder that is not in this layout, a damaged file, and for every tensor that
    is missing, unknown or of the wrong shape.
    """
    folder = Path(folder)
    config = _from_json(folder, read_config(folder), target_layers)
    tensors = {name.removeprefix("model."): value for name, value in read_tensors(folder).items()}
    d2t = _draft_vocabulary(folder, config, tensors)
    head = Eagle3Head(config, d2t)
    check_shapes(folder, tensors, {name: tuple(value.shape) for name, value in weights_of(head).items()})
    dtype = compute_dtype()
    head.load_weights([(name, value if dtype is None else value.astype(dtype)) for name, value in tensors.items()])
    mx.eval(head.parameters())
    return head


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; raises CheckpointError where there is none or it is no JSON object."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise CheckpointError(f"{folder} has no config.json; a head is a folder with config.json and weights") from e
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{file} cannot be read: {e}") from e
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return config


def _to_json(config: Eagle3Config) -> dict[str, Any]:
    fields = dataclasses.asdict(config)
    layers = list(fields.pop("aux_layers"))
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **fields,
        LAYER_IDS: [k + 1 for k in layers],
        "eagle_config": {LAYER_IDS: layers, "use_aux_hidden_state": True},
    }


def _from_json(folder: Path, config: Mapping[str, Any], target_layers: int | None) -> Eagle3Config:
    file = folder / "config.json"
    architectures = config.get("architectures") or [ARCHITECTURE]
    if not any("Eagle3" in name for name in architectures) or "speculators_config" in config:
        raise CheckpointError(f"{file} is of {', '.join(architectures)}; only {ARCHITECTURE} can be read")
    if not (config.get("eagle_config") or {}).get("use_aux_hidden_state", True):
        raise CheckpointError(f"{file} sets use_aux_hidden_state to false; a head without aux layers cannot be read")
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        rope = config.get("rope_parameters") or {}
        scaling = config.get("rope_scaling") or ({k: v for k, v in rope.items() if k != "rope_theta"} or None)
        if scaling and scaling.get("rope_type", scaling.get("type")) == "default":
            scaling = None
        return Eagle3Config(
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_attention_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab_size=int(config["vocab_size"]),
            draft_vocab_size=int(config.get("draft_vocab_size") or config["vocab_size"]),
            target_hidden_size=int(config.get("target_hidden_size") or hidden),
            aux_layers=_aux_layers(file, config, target_layers),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            rope_scaling=scaling,
            max_position_embeddings=int(config.get("max_position_embeddings") or 2048),
            norm_before_residual=bool(config.get("norm_before_residual", False)),
            attention_bias=bool(config.get("attention_bias", False)),
        )
    except KeyError as e:
        raise CheckpointError(f"{file} lacks {e.args[0]}") from e
    except (TypeError, ValueError, ConfigError) as e:
        raise CheckpointError(f"{file} is not usable: {e}") from e


def _aux_layers(file: Path, config: Mapping[str, Any], target_layers: int | None) -> tuple[int, ...]:
    nested = (config.get("eagle_config") or {}).get(LAYER_IDS)
    top = config.get(LAYER_IDS)
    from_top = None if top is None else [k - 1 for k in top]
    if nested is not None and from_top is not None and list(nested) != from_top:
        raise CheckpointError(
            f"{file} names different layers in eagle_config ({nested}: outputs, from 0) and at the top ({top}: outputs "
            "plus one); keep the one that the head was trained with"
        )
    layers = nested if nested is not None else from_top
    if layers is not None:
        if any(k < 0 for k in layers):
            raise CheckpointError(f"{file} names the embedding's output as an aux layer, which cannot be read")
        return tuple(int(k) for k in layers)
    if target_layers is None:
        raise CheckpointError(f"{file} does not name the layers that the head reads; load the head with its target")
    return default_aux_layers(target_layers)


def _draft_vocabulary(folder: Path, config: Eagle3Config, tensors: dict[str, mx.array]) -> mx.array | None:
    """Take d2t and t2d out of the tensors; d2t int32 [Vd], or None where the head drafts the whole vocabulary."""
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None:
        if config.draft_vocab_size != config.vocab_size:
            raise CheckpointError(
                f"{folder} lacks d2t, but its draft vocabulary ({config.draft_vocab_size}) is smaller than the "
                f"target's ({config.vocab_size})"
            )
        return None
    if d2t.shape != (config.draft_vocab_size,):
        raise CheckpointError(f"d2t in {folder} has shape {d2t.shape}, expected ({config.draft_vocab_size},)")
    kept = np.array(d2t, np.int64) + np.arange(config.draft_vocab_size)
    if kept[0] < 0 or kept[-1] >= config.vocab_size or np.any(np.diff(kept) <= 0):
        raise CheckpointError(f"d2t in {folder} does not lead to ascending ids of a vocabulary of {config.vocab_size}")
    if t2d is not None and not np.array_equal(np.flatnonzero(np.array(t2d)), kept):
        raise CheckpointError(f"t2d and d2t in {folder} name different draft vocabularies; one of them is damaged")
    return None if config.draft_vocab_size == config.vocab_size else d2t.astype(mx.int32)
