"""Settings for known models, one file each."""

from pathlib import Path

RECIPES = Path(__file__).parent
OWN_RECIPE = ""
"""The value of `--recipe` without a name: use the target's recipe."""


def recipe_names() -> list[str]:
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))
