"""Recipes: settings that fit a known model, with what its config.json says of it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eagle_mlx.errors import ConfigError

from ..config import from_mapping

FOLDER = Path(__file__).parent.parent / "recipes"


@dataclass(frozen=True)
class Recipe:
    name: str
    about: str
    source: str
    """Where the model is published; `model` is as its config.json has it."""
    settings: Mapping[str, Any]
    """Of TrainConfig, by name."""
    model: Mapping[str, Any]
    """Fields of the model's config.json, and how the weights of `settings['target']` are quantised."""
    tokens_each: int
    """Tokens of a conversation, where an estimate must be made before any is read; an assumption."""


def recipe_names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def load_recipe(name: str) -> Recipe:
    """The recipe of that name. Raises ConfigError, with all names, where there is none."""
    if name not in recipe_names():
        near = difflib.get_close_matches(name.lower(), recipe_names(), 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"there is no recipe {name}: {hint}the recipes are {', '.join(recipe_names())}")
    values = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    recipe = Recipe(name=name, **values)
    from_mapping(recipe.settings)
    return recipe


def described(recipe: Recipe | None, target: str) -> Mapping[str, Any] | None:
    """What a recipe says of the target's config, unless the target is another one than the recipe's."""
    return recipe.model if recipe is not None and recipe.settings["target"] == target else None
