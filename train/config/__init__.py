"""The trainer's settings: frozen groups of dataclass fields, which flags, YAML files and saved runs fill by name."""

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
from .load import file_type, load_config, named_settings, pass_type

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
