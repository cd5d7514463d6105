"""Recipes: settings that fit a known model, with what its config.json says of it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eagle_mlx.catalog.base_model import names_of, same_model
from eagle_mlx.errors import ConfigError
from eagle_mlx.hub import hub_id

from ..config import TrainConfig

_BITS = re.compile(r"\b(\d)-?bit", re.IGNORECASE)
"""How mlx-community's names tell the bits of a quantized model, in groups of mlx-lm's default of 64."""
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

    @property
    def base_model(self) -> str:
        """Hub id of the model as its makers published it."""
        return self.source.removeprefix("https://huggingface.co/")


def recipe_names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def load_recipe(name: str) -> Recipe:
    """The recipe of that name, or for the model of that name. Raises ConfigError, with all names, for none."""
    recipe = _read(name) if name in recipe_names() else recipe_for(name)
    if recipe is None:
        near = difflib.get_close_matches(name.rpartition("/")[2].lower(), recipe_names(), 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"there is no recipe {name}: {hint}the recipes are {', '.join(recipe_names())}")
    TrainConfig.of(**recipe.settings)
    return recipe


def recipe_for(target: str) -> Recipe | None:
    """The recipe for a target, told by its name or by that of the model that it was made of."""
    names = names_of(target)
    every = map(_read, recipe_names())
    return next((one for one in every if any(same_model(name, one.base_model) for name in names)), None)


def _read(name: str) -> Recipe:
    return Recipe(name=name, **yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8")))


def described(recipe: Recipe | None, target: str) -> Mapping[str, Any] | None:
    """What a recipe says of the target's config, unless the target is another one than the recipe's.

    A bare name means mlx-community's. Nobody is asked.
    """
    return recipe.model if recipe is not None and hub_id(recipe.settings["target"]) == hub_id(target) else None


def described_by_name(target: str) -> Mapping[str, Any] | None:
    """What a recipe says of the model that a target was made of, quantized as the target's name says.

    None if there is no such recipe. It is for when the hub cannot be asked: only the name tells how weights are stored.
    """
    recipe = recipe_for(target)
    if recipe is None:
        return None
    model = {key: value for key, value in recipe.model.items() if key != "quantization"}
    bits = _BITS.search(target)
    return {**model, "quantization": {"group_size": 64, "bits": int(bits[1])}} if bits else model
