"""The quantization of an MTP layer that MLX quantized, in a model's files or in a folder of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from eagle_mlx.errors import ConfigError
from eagle_mlx.formats.fields import Quantization, read_quantization

_PREFIXES = ("", "mtp.", "language_model.mtp.")
"""What may precede a layer's name in the config, which may be a copy of the model's."""
_ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")
"""Layers that mlx-lm quantizes in 8 bits whatever the others have."""


def common_quantization(
    config: Mapping[str, Any], tensors: Mapping[str, mx.array]
) -> tuple[dict[str, mx.array], Quantization | None]:
    """Return the tensors, and the quantization of all layers that have scales.

    Routers that are quantized differently become full precision. Raises ConfigError if other layers are not alike.
    """
    how, made = config.get("quantization"), dict(tensors)
    if not isinstance(how, dict):
        return made, read_quantization(config)
    layers = sorted(name.removesuffix(".scales") for name in tensors if name.endswith(".scales"))
    found: Quantization | None = None
    for name in sorted(layers, key=lambda name: name.endswith(_ROUTERS)):
        own = _of_layer(how, name.removeprefix("mtp."))
        if found is not None and own is not None and own != found and name.endswith(_ROUTERS):
            weight, scales, biases = (made.pop(f"{name}.{part}") for part in ("weight", "scales", "biases"))
            made[f"{name}.weight"] = mx.dequantize(weight, scales, biases, own["group_size"], own["bits"])
        elif found not in (None, own):
            raise ConfigError(f"quantization of {name} is {own}, of others {found}; quantize all layers alike")
        else:
            found = own
    return made, found


def _of_layer(how: Mapping[str, Any], name: str) -> Quantization | None:
    """Return the quantization of a layer that a config names, else the common one."""
    named = [how[prefix + name] for prefix in _PREFIXES if isinstance(how.get(prefix + name), dict)]
    common = {key: value for key, value in how.items() if not isinstance(value, dict | bool)}
    return read_quantization({"quantization": named[0] if named else common})
