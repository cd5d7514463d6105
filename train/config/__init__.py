"""The trainer's settings: frozen groups of dataclass fields, which flags, YAML files and saved runs fill by name."""

from eagle_mlx.setting import Setting, flag, settings_of

from .groups import (
    NOT_BESIDE_HOURS,
    SELF,
    DataConfig,
    EvaluationConfig,
    HeadConfig,
    OptimizationConfig,
    RunConfig,
    TrainConfig,
    find,
    groups,
)
from .load import file_type, from_mapping, load_config, named_settings, pass_type

__all__ = [
    "NOT_BESIDE_HOURS",
    "SELF",
    "DataConfig",
    "EvaluationConfig",
    "HeadConfig",
    "OptimizationConfig",
    "RunConfig",
    "Setting",
    "TrainConfig",
    "file_type",
    "find",
    "flag",
    "from_mapping",
    "groups",
    "load_config",
    "named_settings",
    "pass_type",
    "settings_of",
]
