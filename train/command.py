"""From the flags of eagle-train to a run: its settings, its recipe and its processes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_mlx import blas
from eagle_mlx.catalog import is_embedded_target
from eagle_mlx.command import Stop
from eagle_mlx.cpu import tune_process
from eagle_mlx.errors import ConfigError

from .config import NOT_WITH_HOURS, SELF, TrainConfig, named_settings
from .distributed import SINGLE_PROCESS, World
from .job import run
from .plan import Recipe, load_recipe, plan_of, recipe_for
from .recipes import OWN_RECIPE
from .run import resumed_config


def run_command(
    resume: Path | None, name: str | None, dry_run: bool, file: Path | None, flags: Mapping[str, Any]
) -> None:
    """Plan, start or resume a run in every process. name: the recipe. file: settings. Raises EagleError."""
    print(f"blas: {blas.activate()}", file=sys.stderr)
    if resume is not None and (name is not None or dry_run):
        raise ConfigError("--resume uses the run's own settings: leave out --recipe and --dry-run")
    if dry_run:
        print(plan_of(*new_run(name, file, flags)))
        return
    tune_process()
    stop, world = Stop(), World.init()
    with stop.listening():
        if not world.is_rank_zero:
            config = TrainConfig.of(**world.broadcast())
        elif resume is None:
            config, _ = new_run(name, file, flags)
        elif file is not None:
            raise ConfigError("--resume uses the run's own settings: leave out -c")
        else:
            config = resumed_config(resume, flags)
        if world.is_rank_zero:
            world.broadcast(config.flat())
        if config.loading.shard != "none":
            config.loading.follow(config.head.target)
            world = SINGLE_PROCESS  # the other ranks only run the target; this process trains the head
        run(config, stop, resume, world)


def new_run(name: str | None, file: Path | None, flags: Mapping[str, Any]) -> tuple[TrainConfig, Recipe | None]:
    """Return the settings of a new run and its recipe. Without data settings, the target makes up the data.

    Raises ConfigError.
    """
    named = named_settings(file, flags)
    target = str(named.get("target", ""))
    if name == OWN_RECIPE and not target:
        raise ConfigError("--recipe without a name uses the recipe for the target: name the target with --target")
    recipe = None if name is None else load_recipe(name or target, str(named.get("head", "")))
    known = dict(recipe.settings) if recipe else {}
    if named.get("hours"):  # the target makes the data, so ignore a recipe's
        known = {setting: value for setting, value in known.items() if setting not in ("map", *NOT_WITH_HOURS)}
        known["data"] = [SELF]
    named = named_settings(file, flags, known)
    if target and not (named.get("data") or named.get("shards") or is_embedded_target(target)):
        named["data"] = [SELF]
        fits = recipe_for(target)
        others = f"; data sets for it: --recipe {fits.name}" if fits else ""
        print(f"no --data is given, so {target} writes conversations first (--data self){others}", file=sys.stderr)
    config = TrainConfig.of(**named)
    if "self_tokens" in named and not config.data.is_self:
        raise ConfigError("--self-tokens applies only to --data self; leave it out with other data")
    return config, recipe
