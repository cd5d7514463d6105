"""A training from its settings to the head: settings, target, data, training, and the head's registration.

from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.job import run

report = run(TrainConfig.of(target="checkpoints/target", output="out/head", max_steps=100))
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from eagle_mlx import blas
from eagle_mlx.catalog import is_embedded_target
from eagle_mlx.catalog.head_search import LEAST, register
from eagle_mlx.command import Stop, shown
from eagle_mlx.cpu import tune_process
from eagle_mlx.data_pipelines import Wanted
from eagle_mlx.errors import ConfigError
from eagle_mlx.files import check_writable
from eagle_mlx.progress import counted
from eagle_mlx.target import Target, fingerprint

from .adaptation import LEARNING, Adaptation, division, making_limits, prepare, settled
from .config import NOT_WITH_HOURS, SELF, HeadConfig, TrainConfig, TrainSettings, named_settings
from .data import TrainData, check_data, heldout_prompts, make_data, self_file, training_data
from .distributed import SINGLE_PROCESS, World
from .hours import FINGERPRINT, train_for_hours
from .kind_settings import KIND_SETTINGS
from .kinds import KINDS, check_supported, parameters_of
from .plan import BatchSizePlan, Recipe, batches_for, bound_of, load_recipe, plan_of, probe, recipe_for, typical
from .recipes import OWN_RECIPE
from .run import (
    BEST,
    LAST,
    check_incomplete,
    check_wandb,
    claim,
    data_fingerprint,
    existing_head,
    resumed_config,
    run_worker,
    set_up,
    train,
)


def run_command(
    resume: Path | None, name: str | None, dry_run: bool, file: Path | None, flags: Mapping[str, Any]
) -> None:
    """Plan, start or resume a run in every process. name: the recipe. file: settings. Raises EagleError."""
    print(f"blas: {blas.activate()}", file=sys.stderr)
    if resume is not None and (name is not None or dry_run or file is not None):
        raise ConfigError("--resume uses the run's own settings: leave out -c, --recipe and --dry-run")
    if dry_run:
        config, recipe = new_run(name, file, flags)
        print(plan_of(settled(config), recipe))
        if (limit := _limit(config)) < math.inf:
            print(f"limit       {division(config, limit)}")
        return
    tune_process()
    stop, world = Stop(), World.init()
    with stop.listening():
        if world.is_rank_zero:
            config = new_run(name, file, flags)[0] if resume is None else resumed_config(resume, flags)
            world.broadcast(config.flat())
        else:
            config = TrainConfig.of(**world.broadcast())
        if config.loading.shard != "none":
            config.loading.follow(config.head.target)
            world = SINGLE_PROCESS  # the other ranks only run the target; this process trains the head
        run(config, stop, resume, world)


def new_run(name: str | None, file: Path | None, flags: Mapping[str, Any]) -> tuple[TrainConfig, Recipe | None]:
    """Return a new run's settings and recipe; without data, the target makes it up. Raises ConfigError."""
    named = named_settings(file, flags)
    target = str(named.get("target", ""))
    if name == OWN_RECIPE and not target:
        raise ConfigError("--recipe without a name uses the recipe for the target: name the target with --target")
    recipe = None if name is None else load_recipe(name or target, str(named.get("head", "")))
    settings = _without_replaced(recipe.settings, named) if recipe else {}
    if named.get("hours") and not named.get("adapt"):  # the target makes the data
        settings["data"] = [SELF]
    named = named_settings(file, flags, settings)
    if named.get("adapt") and not (named.get("data") or named.get("prompts")):
        raise ConfigError(
            "--adapt needs prompts: name files with --prompts, which the target answers, or conversations with --data; "
            "with --data self, the target makes them up"
        )
    if target and not (named.get("adapt") or named.get("data") or named.get("shards") or is_embedded_target(target)):
        named["data"] = [SELF]
        fits = recipe_for(target)
        others = f"; data sets for it: --recipe {fits.name}" if fits else ""
        print(f"no --data is given, so {target} writes conversations first (--data self){others}", file=sys.stderr)
    config = TrainConfig.of(**named)
    if "self_tokens" in named and not config.data.is_self:
        raise ConfigError("--self-tokens applies only to --data self; leave it out with other data")
    return config, recipe


def _without_replaced(recipe: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's settings without those for its kind of head, steps or data, if the user names others."""
    replaced, kind = set[str](), KIND_SETTINGS.get(str(named.get("head")))
    if kind is not None and named["head"] != recipe.get("head", HeadConfig.kind):
        replaced |= {*kind.defaults, *kind.foreign}
    if named.get("step_weights"):
        replaced |= {"unroll", "decay"}
    if named.get("prompts"):
        replaced.add("data")
    if named.get("hours") and not named.get("adapt"):
        replaced |= {"map", *NOT_WITH_HOURS}
    return {name: value for name, value in recipe.items() if name not in replaced}


def run(
    config: TrainConfig, stop: Stop | None = None, resume: Path | None = None, world: World = SINGLE_PROCESS
) -> Mapping[str, Any] | None:
    """Train a head, print where it is, and return the report. Only rank 0 of a `world` writes and returns something.

    `stop`: saves the state and raises Stopped when it is asked to; by default Ctrl-C, SIGTERM and SIGHUP do. `resume`:
    the folder of an interrupted run. Raises an EagleError if settings, target or data do not fit.
    """
    if not config.head.target:
        raise ConfigError("no target: name the model with --target")
    if config.data.cache_dir:
        check_writable(Path(config.data.cache_dir))
    limit = _limit(config)
    config = settled(config)
    check_supported(config)
    if config.optimization.hours and world.size > 1:
        raise ConfigError("--hours works with one process only: start it without mlx.launch")
    if config.run.wandb and world.is_rank_zero:
        check_wandb()
    check_incomplete(resume)
    claimed = claim(config.run.output, config.run.overwrite, resume) if world.is_rank_zero else nullcontext()
    with claimed as folder:
        done = _run(config, stop or Stop(), resume, world, folder, limit)
    if done is None:
        return None
    _say(config, resume, *done)
    return done[1]


def _limit(config: TrainConfig) -> float:
    """Return the seconds in which a run that adapts a head makes its data, learns and is judged."""
    hours = config.optimization.hours if config.head.adapt else None
    return math.inf if hours is None else 3600 * hours


def _run(
    given: TrainConfig, stop: Stop, resume: Path | None, world: World, folder: Path | None, limit: float
) -> tuple[Target, Mapping[str, Any]] | None:
    """Load the target, get the data and train in a claimed folder. Return target and report; None on other ranks."""
    begun = time.monotonic()
    check_data(given)
    bound = bound_of(given)
    bound.check()
    config = bound.config
    target = config.loading.load(config.head.target)
    config.loading.wire_active()
    head = existing_head(target, config)
    if head is None:
        KINDS[config.head.kind].check(target, config)
    elif world.is_rank_zero:
        step = config.optimization
        learns = f"learning rate {step.lr:.2g}, loss {step.loss}"
        print(f"head: {config.head.init_from}, {parameters_of(head)}; {learns}", file=sys.stderr)
        if limit < math.inf:
            print(f"time: {division(config, limit)}", file=sys.stderr)
    measured = probe(target, config, head)
    if world.is_rank_zero:
        print(f"measured: {measured}", file=sys.stderr)
    if config.optimization.hours:
        config = _chosen(batches_for(config, given, config.data.self_tokens, speed=measured), world)
        with set_up(target, config, FINGERPRINT, head, resume, stop, claimed=folder) as setup:
            return target, train_for_hours(setup, measured.learned, measured.captured)
    _prepare(target, config, world, lambda share: time.monotonic() - begun > share * limit)
    most = (LEARNING * limit - (time.monotonic() - begun)) / (1 / measured.captured + 1 / measured.learned)
    data = world.in_turn(partial(training_data, target, config, world.is_rank_zero, head, measured.memory, most))
    lengths = data.samples.lengths
    plan = batches_for(config, given, sum(lengths), typical(lengths), measured, world.size)
    config = _chosen(plan, world)
    if limit < math.inf:
        left = max(1.0, LEARNING * limit - (time.monotonic() - begun))
        config = config.changed(minutes=left / 60, max_steps=plan.updates)
    if not world.is_rank_zero:
        run_worker(target, data, config, head, world, stop)
        return None
    config = config if config.data.shards else config.changed(states=data.place)  # for resumed runs too
    data, prompts = _with_prompts(target, config, data)
    adaptation = Adaptation.of(config, target, prompts, data.samples.keys) if config.head.adapt else None
    print("data: " + ", ".join(f"{key} {shown(value)}" for key, value in data.report.items()), file=sys.stderr)
    identity = data_fingerprint(data)
    with set_up(target, config, identity, head, resume, stop, world, claimed=folder, adaptation=adaptation) as setup:
        return target, train(setup, data, prompts, plan.seen / measured.learned)


def _chosen(plan: BatchSizePlan, world: World) -> TrainSettings:
    """Print what a plan has chosen, and return rank 0's settings, since measured speeds differ between machines."""
    if plan.about and world.is_rank_zero:
        print(f"chosen: {plan.about}", file=sys.stderr)
    return TrainSettings.of(**world.broadcast(plan.config.flat()))


def _say(config: TrainConfig, resume: Path | None, target: Target, report: Mapping[str, Any]) -> None:
    """Print where a run's head is and how good it is, and register it for the commands that serve the target."""
    folder, adapted = resume if resume and resume.exists() else Path(config.run.output), report["adapted"]
    learned = f"after {report['tokens']:,} tokens in {report['train_seconds']:.0f} s"
    if adapted is not None:
        name, kept = config.head.adapt, f"it is in {folder / BEST}"
        if not adapted["taken"]:
            kept = f"{folder / BEST} is {name} as it was, and {folder / LAST} the adapted one"
        link = "from" if adapted["verdict"] == "not told apart" else "than"
        print(f"{learned}, the adapted head is {adapted['verdict']} {link} {name}: {adapted['summary']}; {kept}")
        data = report["data"]
        if adapted["taken"]:
            _register(config, folder / BEST, target, report)
        elif data["learned_conversations"] < data["conversations"]:
            of_all = f"{data['learned_conversations']:,} of {counted(data['conversations'], 'conversation')}"
            print(f"only {of_all} were learned; allow more --hours or --max-steps", file=sys.stderr)
        return
    before = f"{config.head.init_from} had" if config.head.init_from else "untrained"
    print(
        f"τ {report['acceptance_length']:.2f} at depth {config.evaluation.depth}, {before} "
        f"{report['untrained_acceptance_length']:.2f}, {learned}; the head is in {folder}/{BEST}"
    )
    if not report["better_than_start"]:
        print("no later head was better than the start, so the start is the best head", file=sys.stderr)
    elif (gain := report["gain_over_start"]) is not None and gain["verdict"] != "better":
        print(f"{counted(gain['conversations'], 'prompt')} cannot tell it from the start; give more", file=sys.stderr)
    _register(config, folder / BEST, target, report)


def _register(config: TrainConfig, best: Path, target: Target, report: Mapping[str, Any]) -> None:
    tau, prompts = report["acceptance_length"], report["acceptance"]["best"]["prompts"]
    measured = tau if report["data"].get("prompts_held_out") else None
    if not register(best, config.head.target, "trained", fingerprint(target), measured, prompts):
        return
    if prompts and tau < LEAST:
        print(f"no command offers it without --head {best}: its τ is below {LEAST}", file=sys.stderr)
    else:
        adapter = f" --adapter-path {config.loading.adapter_path}" if config.loading.adapter_path else ""
        print(f"eagle-serve --target {config.head.target}{adapter} finds it", file=sys.stderr)


def _prepare(target: Target, config: TrainSettings, world: World, over: Callable[[float], bool]) -> None:
    """Let the target make up its data if needed. Raises the errors of reading prompts before work that takes hours.

    over: whether more than a share of the time of a run that adapts a head has passed.
    """
    if config.data.is_self:
        if not config.prompts_are_heldout and world.is_rank_zero:
            heldout_prompts(target, config, most=1)
        wanted = Wanted(tokens=config.data.self_tokens)
        make_data(target, config, world, self_file(config), wanted, making_limits(over))
    elif config.head.adapt:
        prepare(target, config, world, over)
    if world.is_rank_zero:
        heldout_prompts(target, config, most=1)


def _with_prompts(target: Target, config: TrainSettings, data: TrainData) -> tuple[TrainData, list[list[int]]]:
    """Return the data, with a report on the prompts, and prompts that are not trained on."""
    trained = data.samples.keys
    prompts = heldout_prompts(target, config, trained)
    facts = prompts.facts(trained)
    if prompts.left_out:
        left_out = counted(prompts.left_out, "conversation")
        print(f"prompts: {left_out} left out, because the head is trained on them", file=sys.stderr)
    if not facts["prompts_held_out"]:
        print("prompts: the data does not say which conversations it holds; some may be trained on", file=sys.stderr)
    return replace(data, report={**data.report, **facts}), prompts.tokens
