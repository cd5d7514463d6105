"""The command `eagle-train`, which trains a head for a target on conversations."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle_mlx.catalog import is_embedded_target
from eagle_mlx.catalog.head_search import LEAST, register
from eagle_mlx.command import Parser, Stop, add_flags, arguments, default_text, exit_code, shown
from eagle_mlx.cpu import blas, tune_process
from eagle_mlx.errors import ConfigError
from eagle_mlx.files import check_writable
from eagle_mlx.progress import counted
from eagle_mlx.setting import Group, Setting, find, setting, settings_of
from eagle_mlx.target import Target, fingerprint

from .config import NOT_WITH_HOURS, SELF, TrainConfig, named_settings
from .data import (
    TrainData,
    check_data,
    check_warmup,
    heldout_prompts,
    make_data,
    training_data,
    warmup_data,
    with_warmup_tokens,
)
from .distributed import SINGLE_PROCESS, World
from .hours import HoursPhases
from .kinds import KINDS, parameters_of, resolved
from .plan import Plan, Recipe, batches_for, bound_of, load_recipe, plan_of, probe, recipe_for, recipe_names, typical
from .report.runs import main as report
from .run import (
    BEST,
    PlainPhases,
    check_incomplete,
    check_wandb,
    claim,
    existing_head,
    resumed_config,
    run_worker,
    train,
)

OWN_RECIPE = ""
"""The value of `--recipe` without a name: use the target's recipe."""
_HELP = """\
Train a new head for a target, or continue training an existing one.

kinds of heads:
  eagle3  reads three of the target's layers; has its own output projection over the most frequent tokens
  eagle   EAGLE-1 and 2: reads the target's last hidden state and predicts the next one
  mtp     one layer of the target's architecture; reads the last hidden state, and is reused for every draft token
  dspark, dflash, peagle   draft a whole block in one forward

examples:
  eagle-train --target checkpoints/target --minutes 6 --rows 4 --length 256 --unroll 3 --lr 2e-3 --output out/head
  eagle-train --target Qwen3-4B-4bit --output out/qwen3-4b-eagle3      (without --data, the target writes it)
  eagle-train --target Qwen3-4B-4bit --hours 8 --output out/night   (the same, portion by portion, in 8 hours)
  eagle-train --target Qwen3-4B-4bit --self-tokens 3000000 --minutes 480 --output out/long --dry-run
  eagle-train --target Qwen3-4B-4bit --data chats.jsonl --output out/qwen3-4b-eagle3
  eagle-train --target Qwen3-4B-4bit --head eagle --data chats.jsonl --output out/qwen3-4b-eagle
  eagle-train --target Qwen3-4B-4bit --head mtp --step-weights .51 .31 .18 --output out/qwen3-4b-mtp
  eagle-train --target Qwen3-4B-4bit --init-from user/qwen3-4b-eagle3 --data mine.jsonl --output out/mine
  eagle-train --target Qwen3-4B-4bit --head dspark --init-from user/dspark --lora-rank 16 --output out/fitted
  eagle-train -c recipe.yaml --seed 1
  eagle-train --resume out/head
  eagle-train report out/head out/mine

eagle-train report compares runs, finished or not: loss, τ, time, and the settings in which they differ.

Without --data or --shards, the target first writes --self-tokens tokens of conversations to OUTPUT.self.jsonl, like
eagle-data make; only the included target does not. If it is interrupted, the same command continues. A later run with
the same target, seed and number of tokens reuses the file. With --hours, making data and training alternate, and the
head drafts the next data.

Flags override the YAML file, which overrides the recipe, which overrides the defaults. A key in the file is the flag
without the leading dashes and with _ for - (draft_vocab: 32000). A bare model name such as Qwen3-4B-4bit means
mlx-community/Qwen3-4B-4bit.

Ctrl-C (or SIGTERM) saves the run's state and stops. --resume continues exactly from there, or after a crash from the
last saved state. A second Ctrl-C stops immediately.
"""


@dataclass(frozen=True)
class Start(Group):
    """Options of a start, apart from the run's settings."""

    resume: Path | None = setting(None, "continue the run in this folder, with its settings", metavar="DIR")
    recipe: str | None = setting(
        None,
        "settings for a known model, by recipe or model name; without NAME, the recipe for --target. Recipes: "
        + ", ".join(recipe_names()),
        bare=OWN_RECIPE,
    )
    dry_run: bool = setting(False, "print the plan, memory and time of the run, and stop")
    config_file: Path | None = setting(None, "YAML file with settings", name="config", also=("-c",))


def main(argv: Sequence[str] | None = None) -> int:
    """Train and return the exit code: 0, 2 for an error that the user can fix, 130 or 143 if interrupted."""
    given = arguments(argv)
    if given[:1] == ["report"]:
        return report(given[1:])
    return exit_code(lambda: _main(given))


def _main(given: Sequence[str]) -> None:
    flags = vars(flags_parser().parse_args(given))
    start = Start.of(**{name: flags.pop(name) for name in settings_of(Start) if name in flags})
    flags = {name: find(TrainConfig, name).convert(value) for name, value in flags.items()}
    print(f"blas: {blas.activate()}", file=sys.stderr)
    resume, name = start.resume, start.recipe
    if resume is not None and (name is not None or start.dry_run):
        raise ConfigError("--resume uses the run's own settings: leave out --recipe and --dry-run")
    if start.dry_run:
        print(plan_of(*new_run(name, start.config_file, flags)))
        return
    tune_process()
    stop, world = Stop(), World.init()
    with stop.listening():
        if not world.is_rank_zero:
            config = TrainConfig.of(**world.broadcast())
        elif resume is None:
            config, _ = new_run(name, start.config_file, flags)
        elif start.config_file is not None:
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


def run(config: TrainConfig, stop: Stop, resume: Path | None = None, world: World = SINGLE_PROCESS) -> None:
    """Run the training and print where the head is. Only rank 0 of a `world` writes files and reports progress."""
    if not config.head.target:
        raise ConfigError("no target: name the model with --target")
    if config.data.cache_dir:
        check_writable(Path(config.data.cache_dir))
    config = resolved(config)
    if config.optimization.hours and world.size > 1:
        raise ConfigError("--hours works with one process only: start it without mlx.launch")
    if config.run.wandb and world.is_rank_zero:
        check_wandb()
    check_incomplete(resume)
    claimed = claim(config.run.output, config.run.overwrite, resume) if world.is_rank_zero else nullcontext()
    with claimed as folder:
        done = _run(config, stop, resume, world, folder)
    if done is not None:
        _say(config, resume, *done)


def _run(
    config: TrainConfig, stop: Stop, resume: Path | None, world: World, folder: Path | None
) -> tuple[Target, Mapping[str, Any]] | None:
    """Load the target, get the data and train in a claimed folder. Return target and report; None on other ranks."""
    check_data(config)
    bound_of(config).check()
    target = config.loading.load(config.head.target)
    config.loading.wire_active()
    head = existing_head(target, config)
    if head is None:
        KINDS[config.head.kind].check(target, config)
    elif world.is_rank_zero:
        print(f"head: {config.head.init_from}, {parameters_of(head)}", file=sys.stderr)
    measured = probe(target, config, head)
    if world.is_rank_zero:
        print(f"measured: {measured}", file=sys.stderr)
    check_warmup(target, config)
    if config.optimization.hours:
        config = _chosen(batches_for(config, config.data.self_tokens, speed=measured), world)
        config = with_warmup_tokens(config, 0, measured.read, world)
        over_time = HoursPhases(measured.learned, measured.read)
        return target, train(target, over_time, config, head, resume, stop, claimed=folder)
    _prepare(target, config, world)
    data = world.in_turn(lambda: training_data(target, config, world.is_rank_zero, head, measured.memory))
    lengths = data.samples.lengths
    plan = batches_for(config, sum(lengths), typical(lengths), measured, world.size)
    config = with_warmup_tokens(_chosen(plan, world), sum(lengths), measured.read, world)
    warmup = world.in_turn(lambda: warmup_data(target, config, data))
    if not world.is_rank_zero:
        run_worker(target, data, config, head, world, stop, warmup)
        return None
    config = config if config.data.shards else config.changed(states=data.place)  # for resumed runs too
    data, prompts = _with_prompts(target, config, data, warmup)
    print("data: " + ", ".join(f"{key} {shown(value)}" for key, value in data.report.items()), file=sys.stderr)
    phases = PlainPhases(data, prompts, warmup, plan.seen / measured.learned)
    return target, train(target, phases, config, head, resume, stop, world, claimed=folder)


def _chosen(plan: Plan, world: World) -> TrainConfig:
    """Print what a plan has chosen, and return rank 0's settings, since measured speeds differ between machines."""
    if plan.about and world.is_rank_zero:
        print(f"chosen: {plan.about}", file=sys.stderr)
    return TrainConfig.of(**world.broadcast(plan.config.flat()))


def _say(config: TrainConfig, resume: Path | None, target: Target, report: Mapping[str, Any]) -> None:
    """Print where a run's head is and how good it is, and register it for the commands that serve the target."""
    folder = resume if resume and resume.exists() else config.run.output
    before = f"{config.head.init_from} had" if config.head.init_from else "untrained"
    print(
        f"τ {report['acceptance_length']:.2f} at depth {config.evaluation.depth}, {before} "
        f"{report['untrained_acceptance_length']:.2f}, after {report['tokens']:,} tokens in "
        f"{report['train_seconds']:.0f} s; the head is in {folder}/{BEST}"
    )
    if not report["better_than_start"]:
        print("no later head was better than the start, so the start is the best head", file=sys.stderr)
    best = Path(folder) / BEST
    tau, prompts = report["acceptance_length"], report["acceptance"]["best"]["prompts"]
    known = tau if report["data"].get("prompts_held_out") else None
    if register(best, config.head.target, "trained", fingerprint(target), known, prompts):
        if prompts and tau < LEAST:
            print(f"no command offers it without --head {best}: its τ is below {LEAST}", file=sys.stderr)
            return
        adapter = f" --adapter-path {config.loading.adapter_path}" if config.loading.adapter_path else ""
        print(f"eagle-serve --target {config.head.target}{adapter} finds it", file=sys.stderr)


def _prepare(target: Target, config: TrainConfig, world: World) -> None:
    """Let the target make up its data if needed.

    Raises the errors of reading prompts for acceptance measurements before work that takes hours.
    """
    if not config.prompts_are_heldout and world.is_rank_zero:
        heldout_prompts(target, config, most=1)
    if config.data.is_self:
        make_data(target, config, world)
    if config.prompts_are_heldout and world.is_rank_zero:
        heldout_prompts(target, config, most=1)


def _with_prompts(
    target: Target, config: TrainConfig, data: TrainData, warmup: TrainData | None
) -> tuple[TrainData, list[list[int]]]:
    """Return the data, with a report on the prompts, and prompts that are not trained on."""
    trained = data.samples.keys | (warmup.samples.keys if warmup is not None else frozenset())
    prompts = heldout_prompts(target, config, trained)
    facts = prompts.facts(trained)
    if prompts.left_out:
        left_out = counted(prompts.left_out, "conversation")
        print(f"prompts: {left_out} left out, because the head is trained on them", file=sys.stderr)
    if not facts["prompts_held_out"]:
        print("prompts: the data does not say which conversations it holds; some may be trained on", file=sys.stderr)
    return replace(data, report={**data.report, **facts}), prompts.tokens


def flags_parser() -> Parser:
    """Return a parser with a flag per setting. Flags that are not given are absent from its result."""
    parser = Parser(
        prog="eagle-train",
        description=_HELP,
        usage="%(prog)s --target MODEL [settings]\n       %(prog)s --resume DIR\n       %(prog)s report DIR [DIR ...]",
    )
    add_flags(parser, Start)
    add_flags(parser, TrainConfig, _default)
    return parser


def _default(known: Setting) -> str:
    """Return the default for a flag's help, for each kind of head if they differ."""
    if not any(known.name in kind.defaults for kind in KINDS.values()):
        return default_text(known)
    kinds: dict[Any, list[str]] = {}
    for kind in KINDS.values():
        if known.name not in kind.foreign:
            kinds.setdefault(kind.defaults.get(known.name, known.default), []).append(kind.name)
    if len(kinds) == 1:
        return shown(next(iter(kinds)))
    return "; ".join(f"{shown(value) or 'none'} for {', '.join(names)}" for value, names in kinds.items())


if __name__ == "__main__":
    sys.exit(main())
