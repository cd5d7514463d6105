"""Build heads from MTP layers of published models, of conversions that kept them, and of speculators."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from eagle_mlx.errors import CheckpointError, check
from eagle_mlx.formats.fields import NOTED, Quantization, read_config, read_quantization, reading
from eagle_mlx.formats.mtp_layers import SHARED, file_of, layer_of, mtp_prefix, no_layer, read_layer_tensors
from eagle_mlx.formats.tensors import Tensors
from eagle_mlx.heads.base import build
from eagle_mlx.heads.mtp.head import MTPConfig, MTPHead, read_layer

_DEEPSEEK = {
    **{name: name for name in ("enorm", "hnorm", "eh_proj", "embed_tokens")},
    **{"shared_head.norm": "norm", "shared_head.head": "lm_head"},
}
MIMO = {
    **{"token_layernorm": "enorm", "hidden_layernorm": "hnorm"},
    **{"input_proj": "eh_proj", "final_layernorm": "norm"},
}
QWEN = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "norm"}
"""Maps published names of the parts around the layer to the head's names."""

_AROUND = ("enorm.weight", "hnorm.weight", "norm.weight")
_WITHIN = ("input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight")
ZERO_CENTRED = frozenset({"qwen3_next", "qwen3_5"})
"""Architectures whose published norms multiply by one plus their weight."""
_EXPERT = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_PREFIXES = ("", "mtp.", "language_model.mtp.")
"""Prefixes of a layer's name in the config, which may be a copy of the model's."""
_ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")  # layers that mlx-lm quantizes in 8 bits whatever the others have


def mtp_of_model(folder: str | Path, index: int = 0, target_norm: bool = True) -> tuple[MTPHead, list[str]]:
    """Build the head from an original model's folder, of which only the files with MTP layer `index` are needed.

    Returns it with notes on the decisions made. Raises CheckpointError if there is no layer or no known architecture.
    """
    folder = Path(folder)
    config = read_config(folder)
    with reading(folder / "config.json"):
        prefix = mtp_prefix(config, index)
        tensors, (file, layer) = read_layer_tensors(folder, prefix), layer_of(config)
        own, quantization = common_quantization(config, _under(tensors, prefix, folder))
        of_deepseek = file in ("deepseek_v3", "glm4_moe")
        if of_deepseek:
            inner = _renamed(read_layer(file, layer, own), _DEEPSEEK)
        else:
            inner = _stacked(_renamed(own, MIMO) if file == "mimo" else _of_qwen(own, index))
        inner, of_ends = _without_copies(inner, tensors)
        inner, of_norms = _plain_norms(file, inner)
        made = MTPConfig(
            model_type=file,
            layer=layer,
            hidden_first=file == "mimo",
            target_norm=target_norm,
            norm_output=not of_deepseek,
            own_embedding="embed_tokens.weight" in inner,
            own_lm_head="lm_head.weight" in inner,
            quantization=quantization,
        )
    return build(folder, MTPHead, made, inner), of_norms + of_ends


def mtp_of_speculators(config: Mapping[str, Any], tensors: Tensors) -> tuple[MTPConfig, Tensors]:
    """Return a head's config and weights from a speculators checkpoint, which reads the target before its final norm.

    `target_norm` under `eagle_mlx` in the config overrides that. Raises ConfigError if the architecture is unknown,
    CheckpointError if there is no MTP layer.
    """
    layer = dict(config.get("transformer_layer_config") or {})
    file = file_of(layer.get("model_type"))
    prefix, copies = "mtp_layers.0.", ("verifier_lm_head.weight",)
    inner = _stacked(_renamed(_under(tensors, prefix), MIMO))
    inner |= {name: x for name, x in tensors.items() if not name.startswith((prefix, *copies))}
    noted = config.get("eagle_mlx") or {}
    inner = with_ones(inner) if noted.get(NOTED) else _plain_norms(file, inner)[0]
    made = MTPConfig(
        model_type=file,
        layer=layer,
        target_norm=bool(noted.get("target_norm", False)),
        norm_output=True,
        own_embedding="embed_tokens.weight" in inner,
        own_lm_head="lm_head.weight" in inner,
    )
    return made, inner


def split_layer(layer: Mapping[str, Any], tensors: Tensors) -> tuple[str, Tensors]:
    """Return mlx-lm's module and a head's weights for Qwen's MTP layer; names with `mtp.` have zero-centered norms."""
    file = file_of(layer.get("model_type") or "qwen3_5")
    inner = _stacked(_of_qwen({name.removeprefix("mtp."): value for name, value in tensors.items()}, 0))
    return file, _plain_norms(file, inner)[0] if any(name.startswith("mtp.") for name in tensors) else inner


def _under(tensors: Tensors, prefix: str, where: str | Path = "the checkpoint") -> Tensors:
    own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    if not own:
        raise no_layer(where, prefix)
    return own


def _renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """Rename the parts around the layer to the head's names; all other tensors belong to the layer."""
    renamed = {}
    for name, value in tensors.items():
        module, _, last = name.rpartition(".")
        renamed[f"{names[module]}.{last}" if module in names else f"block.{name}"] = value
    return renamed


def _of_qwen(tensors: Tensors, index: int) -> Tensors:
    around = {name: value for name, value in tensors.items() if not name.startswith("layers.")}
    return _renamed({**_under(tensors, f"layers.{index}."), **around}, QWEN)


def _stacked(tensors: Tensors) -> Tensors:
    """Stack experts as in mlx-lm: one array for each projection."""
    stacked: Tensors = {}
    experts: dict[tuple[str, str], dict[int, mx.array]] = {}
    for name, value in tensors.items():
        if single := _EXPERT.fullmatch(name):
            experts.setdefault((single[1], single[3]), {})[int(single[2])] = value
        elif name.endswith(".mlp.experts.gate_up_proj"):
            gate, up = mx.split(value, 2, axis=-2)
            prefix = name.removesuffix("experts.gate_up_proj")
            stacked |= {f"{prefix}switch_mlp.gate_proj.weight": gate, f"{prefix}switch_mlp.up_proj.weight": up}
        elif name.endswith(".mlp.experts.down_proj"):
            stacked[name.replace("experts.down_proj", "switch_mlp.down_proj.weight")] = value
        else:
            stacked[name] = value
    for (prefix, projection), parts in experts.items():
        if sorted(parts) != list(range(len(parts))):
            raise CheckpointError(f"{prefix}.experts have only {len(parts)} of {max(parts) + 1} {projection} weights")
        stacked[f"{prefix}.switch_mlp.{projection}.weight"] = mx.stack([parts[i] for i in range(len(parts))])
    return stacked


def _without_copies(inner: Tensors, tensors: Tensors) -> tuple[Tensors, list[str]]:
    """Remove an embedding or output projection that is a copy of the model's; return notes on each."""
    notes = []
    for name, shared in zip(("embed_tokens.weight", "lm_head.weight"), SHARED, strict=True):
        mine, theirs = inner.get(name), tensors.get(shared)
        if mine is None:
            continue
        if theirs is None:
            notes.append(f"{name} is kept: it may be a copy of the model's own, which is not available")
        elif mine.shape == theirs.shape and bool(mx.array_equal(mine, theirs)):
            del inner[name]
            notes.append(f"{name} is the model's own, so the target's is used")
        else:
            notes.append(f"{name} is kept: it is not the model's own")
    return inner, notes


def common_quantization(config: Mapping[str, Any], tensors: Tensors) -> tuple[Tensors, Quantization | None]:
    """Return the tensors, and the quantization of all layers that have scales.

    Routers that are quantized differently become full precision. Raises ConfigError if other layers are not alike.
    """
    written, plain = config.get("quantization"), dict(tensors)
    if not isinstance(written, dict):
        return plain, read_quantization(config)
    layers = sorted(name.removesuffix(".scales") for name in tensors if name.endswith(".scales"))
    common: Quantization | None = None
    for name in sorted(layers, key=lambda name: name.endswith(_ROUTERS)):
        own = _of_layer(written, name.removeprefix("mtp."))
        if common is not None and own is not None and own != common and name.endswith(_ROUTERS):
            weight, scales, biases = (plain.pop(f"{name}.{part}") for part in ("weight", "scales", "biases"))
            plain[f"{name}.weight"] = mx.dequantize(weight, scales, biases, own["group_size"], own["bits"])
            continue
        alike = common in (None, own)
        check(alike, f"quantization of {name} is {own}, of others {common}; quantize all layers alike")
        common = own
    return plain, common


def _of_layer(written: Mapping[str, Any], name: str) -> Quantization | None:
    """Return the quantization of a layer that a config names, else the common one."""
    named = [written[prefix + name] for prefix in _PREFIXES if isinstance(written.get(prefix + name), dict)]
    common = {key: value for key, value in written.items() if not isinstance(value, dict | bool)}
    return read_quantization({"quantization": named[0] if named else common})


def norms_of(inner: Tensors) -> tuple[list[str], list[str]]:
    """Return the names of the norms in the layer, and of those around it."""
    within = [name for name in inner if name.startswith("block.") and name.endswith(_WITHIN)]
    return within, [name for name in inner if name in _AROUND]


def with_ones(inner: Tensors) -> Tensors:
    """Convert zero-centered norms to plain ones, in the dtype of the head's projection."""
    dtype = inner["eh_proj.weight"].dtype if "eh_proj.weight" in inner else mx.float32
    within, around = norms_of(inner)
    return inner | {name: (inner[name].astype(mx.float32) + 1).astype(dtype) for name in within + around}


def _plain_norms(file: str, inner: Tensors) -> tuple[Tensors, list[str]]:
    """Convert zero-centered norms to plain ones; return notes on each group of norms.

    Published Qwen norms are zero-centered, but some copies have one added to a group. The mean of each group decides.
    """
    notes: list[str] = []
    groups = zip(("the layer's", "the head's own"), norms_of(inner), strict=True) if file in ZERO_CENTRED else ()
    for what, group in groups:
        if not group:
            continue  # missing tensors are reported when the head is filled
        mean = float(np.mean(np.array([inner[name].astype(mx.float32).mean() for name in group])))
        kind = "not changed"
        if mean < 0.5:
            inner |= {name: inner[name] + 1 for name in group}
            kind = "zero-centered, one was added"
        notes.append(f"{what} norms have a mean of {mean:.2f}: {kind}")
    return inner, notes
