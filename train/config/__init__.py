"""The trainer's settings: frozen groups of fields, filled by name from YAML files, recipes, flags and saved runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from eagle_mlx.errors import ConfigError
from eagle_mlx.files import read_yaml
from eagle_mlx.setting import flag

from .groups import (
    NOT_BESIDE_HOURS,
    SELF,
    DataConfig,
    EvaluationConfig,
    HeadConfig,
    OptimizationConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "NOT_BESIDE_HOURS",
    "SELF",
    "DataConfig",
    "EvaluationConfig",
    "HeadConfig",
    "OptimizationConfig",
    "RunConfig",
    "TrainConfig",
    "file_type",
    "flag",
    "load_config",
    "named_settings",
    "pass_type",
]


def load_config(
    file: str | Path | None = None, overrides: Mapping[str, Any] | None = None, recipe: Mapping[str, Any] | None = None
) -> TrainConfig:
    """Defaults, then the recipe, the YAML file and the overrides (flags). Raises ConfigError naming file and key."""
    return TrainConfig.of(**named_settings(file, overrides, recipe))


def named_settings(
    file: str | Path | None = None, overrides: Mapping[str, Any] | None = None, recipe: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What the recipe, the YAML file and the overrides set, the later ones over the earlier. Raises ConfigError."""
    values = _read_yaml(Path(file)) if file else {}
    try:
        TrainConfig.of(**values)  # so that what is wrong with the file is said of the file
    except ConfigError as e:
        raise ConfigError(f"{file}: {e}") from e
    return {**(recipe or {}), **values, **(overrides or {})}


def _read_yaml(file: Path) -> dict[str, Any]:
    values = read_yaml(file, "config file")
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold settings as `key: value` lines, not a {type(values).__name__}")
    return values


_NAMED = {"float32": mx.float32, "bfloat16": mx.bfloat16}


def pass_type(config: TrainConfig, device: mx.Device | None = None) -> mx.Dtype:
    """The type of the forward and backward pass on a device, the default one unless another is given.

    What is left open is bfloat16 on a GPU, as in the field's trainers: it halves what is kept for the gradient, and the
    result is the same (karpathy/nanochat#793, on MPS: 26 % less memory, 0.04 % of the loss). MLX's float32 products on
    an M5 keep 11 bits anyway (ml-explore/mlx#4411). On a CPU only float32 goes through BLAS, which is ten times faster.
    """
    asked = config.optimization.dtype
    if asked != "auto":
        return _NAMED[asked]
    on_gpu = (device or mx.default_device()).type == mx.DeviceType.gpu
    return mx.bfloat16 if on_gpu else mx.float32


def file_type(config: TrainConfig) -> mx.Dtype:
    """The type in which the head is written: as asked, else bfloat16, which is what the field publishes."""
    return _NAMED.get(config.optimization.dtype, mx.bfloat16)
