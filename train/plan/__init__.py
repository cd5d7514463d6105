"""What a run will take before it begins: recipes, shapes, memory, disk, time, and where hidden states go."""

from .cache import cache_folder, choose_states
from .estimate import describe_memory
from .memory import free_disk, memory_gb
from .preflight import Forecast, check, forecast, plan_of
from .recipe import Recipe, load_recipe, recipe_for, recipe_names
from .self_made import keeps_states, learnt_whole, self_file, sources_of

__all__ = [
    "Forecast",
    "Recipe",
    "cache_folder",
    "check",
    "choose_states",
    "describe_memory",
    "forecast",
    "free_disk",
    "keeps_states",
    "learnt_whole",
    "load_recipe",
    "memory_gb",
    "plan_of",
    "recipe_for",
    "recipe_names",
    "self_file",
    "sources_of",
]
