"""The trainer's settings: frozen groups of fields, filled by name from YAML files, recipes, flags and saved runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from eagle_mlx.errors import ConfigError
from eagle_mlx.files import read_yaml
from eagle_mlx.setting import flag

from .groups import (
    MOST_PROMPTS,
    NOT_WITH_HOURS,
    SELF,
    ChosenOptimization,
    TrainConfig,
    TrainSettings,
)


def load_config(
    file: str | Path | None = None, overrides: Mapping[str, Any] | None = None, recipe: Mapping[str, Any] | None = None
) -> TrainConfig:
    """Merge defaults, recipe, YAML file and overrides (flags). Raises ConfigError with file and key."""
    return TrainConfig.of(**named_settings(file, overrides, recipe))


def named_settings(
    file: str | Path | None = None, overrides: Mapping[str, Any] | None = None, recipe: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the settings in recipe, YAML file and overrides; later ones win. Raises ConfigError."""
    values = read_yaml(Path(file), "config file") if file else None
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold settings as `key: value` lines, not a {type(values).__name__}")
    try:
        TrainConfig.of(**values)  # report the file's errors with its name
    except ConfigError as e:
        raise ConfigError(f"{file}: {e}") from e
    return {**(recipe or {}), **values, **(overrides or {})}


_NAMED = {"float32": mx.float32, "bfloat16": mx.bfloat16}


def pass_type(config: TrainConfig, device: mx.Device | None = None) -> mx.Dtype:
    """Return the dtype of the forward and backward pass on a device, by default the default device.

    On a GPU, the default is bfloat16, as in other trainers: it halves the memory for gradients with the same result
    (karpathy/nanochat#793, on MPS: 26 % less memory, 0.04 % of the loss). MLX's float32 products on an M5 keep 11 bits
    anyway (ml-explore/mlx#4411). On a CPU only float32 uses BLAS, which is ten times faster.
    """
    if config.optimization.dtype is not None:
        return _NAMED[config.optimization.dtype]
    on_gpu = (device or mx.default_device()).type == mx.DeviceType.gpu
    return mx.bfloat16 if on_gpu else mx.float32


def file_type(config: TrainConfig) -> mx.Dtype:
    """Return the dtype of the saved head: as configured, else bfloat16, as is usual for published heads."""
    return _NAMED[config.optimization.dtype or "bfloat16"]
