"""The needs of a run: a lower bound before the target is loaded, measured steps afterward, and recipes."""

from .batch_size import BatchSizePlan, batches_for, typical
from .dry_run import plan_of
from .memory import Bound, Probe, bound_of, probe
from .recipe import Recipe, load_recipe, recipe_for
