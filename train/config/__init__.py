"""The trainer's settings: frozen groups of dataclass fields, which flags, YAML files and saved runs fill by name."""

from eagle_mlx.setting import Setting, flag, settings_of

from .dtype import file_type, pass_type
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
from .load import from_mapping, load_config, named_settings

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
