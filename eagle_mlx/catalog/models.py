"""Sizes of published models, and targets of these sizes without their weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import yaml
from mlx_lm.utils import load_model

from eagle_mlx.errors import ConfigError, TargetError, did_you_mean
from eagle_mlx.target import Target


@cache
def published_models() -> Mapping[str, Mapping[str, Any]]:
    """Return fields of config.json by the model's name, as in `qwen3-8b`."""
    models: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text("utf-8"))
    return models


def published_model(name: str) -> Mapping[str, Any]:
    """Return fields of a model's config.json. Raises ConfigError, with all names, if the model is unknown."""
    models = published_models()
    if name not in models:
        hint = did_you_mean(name.rpartition("/")[2].lower(), models)
        raise ConfigError(f"there is no shape {name}: {hint}the shapes are {', '.join(models)}")
    return models[name]


def described_target(name: str, model: Mapping[str, Any], dtype: mx.Dtype = mx.bfloat16) -> Target:
    """Return a target from the fields of its config.json. Its weights are random, and only computed if used.

    `experts` in `quantization` is for a mixture of experts. Raises TargetError if mlx-lm does not support the model.
    """
    fields = dict(model)
    common = dict(fields.pop("quantization", {}))
    experts = common.pop("experts", common)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        try:
            made, _ = load_model(Path(folder), lazy=True, strict=False)
        except (ValueError, KeyError, TypeError) as e:
            raise TargetError(f"{name} has a config that mlx-lm does not support: {e}") from e
    made.set_dtype(dtype)
    if common:

        def choose(path: str, part: nn.Module) -> bool | dict[str, Any]:
            chosen = experts if type(part).__name__ in ("SwitchLinear", "QuantizedSwitchLinear") else common
            return hasattr(part, "to_quantized") and part.weight.shape[-1] % chosen["group_size"] == 0 and chosen

        nn.quantize(made, class_predicate=choose)
    return Target(made, name=name)
