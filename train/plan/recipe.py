"""Recipes: settings for known models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from eagle_mlx.catalog.base_model import names_of, same_model
from eagle_mlx.catalog.models import published_model
from eagle_mlx.errors import ConfigError, did_you_mean

from ..config import TrainConfig
from ..recipes import RECIPES, recipe_names


@dataclass(frozen=True)
class Recipe:
    name: str
    base_model: str  # hub id of the original model. `model` is from its config.json
    settings: Mapping[str, Any]  # settings of TrainConfig, by name
    model: Mapping[str, Any]  # fields of the model's config.json, and the quantization of `settings['target']`
    tokens_each: int = 1000  # assumed tokens per conversation, for estimates before any data is read


def load_recipe(name: str, head: str = "") -> Recipe:
    """Return the recipe with this name or for this model, or its variant for a kind of `head`. Raises ConfigError."""
    recipe = _read(name) if name in recipe_names() else recipe_for(name)
    if recipe is None:
        hint = did_you_mean(name.rpartition("/")[2].lower(), recipe_names())
        raise ConfigError(f"there is no recipe {name}: {hint}the recipes are {', '.join(recipe_names())}")
    if (own := f"{recipe.name}-{head}") in recipe_names():
        recipe = _read(own)
    TrainConfig.of(**recipe.settings)
    return recipe


def recipe_for(target: str) -> Recipe | None:
    """Return the recipe for a target, matched by its name or its base model's."""
    names = names_of(target)
    recipes = map(_read, recipe_names())
    return next((recipe for recipe in recipes if any(same_model(name, recipe.base_model) for name in names)), None)


@cache
def _read(name: str) -> Recipe:
    return Recipe(name=name, **_fields(name))


def _fields(name: str) -> dict[str, Any]:
    """Return the fields of a recipe's file over those of its `base`, another recipe, or of the model with its name."""
    own: dict[str, Any] = yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))
    if "base" not in own:
        return {**own, "model": published_model(name)}
    base = _fields(own.pop("base"))
    return {**base, **own, "settings": {**base["settings"], **own["settings"]}}
