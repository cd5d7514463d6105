"""What a run will take, before it is begun: printed as a plan, and refused where it cannot fit."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_mlx import hub
from eagle_mlx.data_pipelines import shard_meta
from eagle_mlx.errors import ConfigError, EagleError, OutputError
from eagle_mlx.progress import counted
from eagle_mlx.shards import CacheChoice
from eagle_mlx.shards.budget import gb
from eagle_mlx.target import Target

from ..config import TrainConfig, pass_type
from ..kinds import KINDS, resolved
from . import estimate
from .cache import as_asked, choose_states
from .estimate import Disk, Memory
from .fit import check_fits, memory_on
from .hours import curve_of, outlook, rates_of, rows_of
from .machine import Machine, bytes_per_second, work_per_second
from .memory import free_disk
from .recipe import Recipe, described, described_by_name
from .self_made import check_speaks, self_file
from .shapes import HeadShape, TargetShape, blank_head, described_target, shape_of_head, shape_of_target

_COUNT, _EACH = 10_000, 1000
"""Conversations, and tokens of each, where nothing is known of the data."""


@dataclass(frozen=True)
class Tokens:
    """How much there is to learn from."""

    count: int
    how: str
    """Counted, or what was assumed."""


@dataclass(frozen=True)
class Forecast:
    target: TargetShape
    head: HeadShape
    config: TrainConfig
    """Settled."""
    machine: Machine
    tokens: Tokens
    states: CacheChoice
    memory: Memory
    disk: Disk
    work: float
    """Floating-point operations."""


def forecast(
    config: TrainConfig,
    model: Mapping[str, Any] | None = None,
    tokens: Tokens | None = None,
    fetch: bool = False,
    machine: Machine | None = None,
) -> Forecast:
    """What a run with these settings takes on a machine, which is this one unless another is given.

    Of a target in a folder the headers are read, with `fetch` of one on the hub as well; otherwise that is made of
    `model`, the fields of a config.json, or of that file on the hub. No weight is loaded. Raises ConfigError for a
    head that the target cannot have, EagleError for a target that cannot be found, or that is to make up what is learnt
    from and cannot.
    """
    config = resolved(config)
    target = config.loading.load(config.head.target, lazy=True) if fetch else _read(config, model)
    KINDS[config.head.kind].check(target, config)
    if config.data.is_self:
        check_speaks(target)
    machine = machine or Machine.here()
    shape, head = shape_of_target(target, machine.floats), shape_of_head(blank_head(target, config), target)
    tokens = tokens or assumed(config)
    states = _states(config, target, shape, head, tokens, machine)
    online = states.place == "online"
    memory = memory_on(machine, shape, head, config, online, states.size if states.place == "memory" else 0)
    disk = estimate.disk_of(head, config, states.size if states.place == "disk" and not config.data.shards else 0)
    work = estimate.work_of(shape, head, config, tokens.count, online)
    return Forecast(shape, head, config, machine, tokens, states, memory, disk, work)


def assumed(config: TrainConfig, tokens_each: int = _EACH) -> Tokens:
    """The amount of data that nobody has looked at yet."""
    count = config.data.limit or _COUNT
    each = min(tokens_each, config.data.max_length)
    if config.data.is_self:
        most = min(config.data.self_tokens, config.data.limit * each or config.data.self_tokens)
        return Tokens(most, f"conversations that the target makes up first, in {self_file(config)}; --self-tokens")
    how = f"{counted(count, 'conversation')} of {counted(each, 'token')}, assumed" + (
        "" if config.data.limit else "; --limit says how many"
    )
    return Tokens(count * each, how)


def plan_of(config: TrainConfig, recipe: Recipe | None = None) -> str:
    """What `--dry-run` prints: the plan, and a line on whether this machine could do it.

    No data are read: their amount is assumed. A network is not needed: of a target that a recipe describes the recipe
    is enough, and of another one the plan says what needs its config.json. Raises ConfigError without a target.
    """
    if not config.head.target:
        raise ConfigError("no target: name the model that the head is for with --target, or a --recipe")
    each = recipe.tokens_each if recipe is not None else _EACH
    try:
        model = _described(config.head.target, recipe)
    except hub.UnreachableError as e:
        return _unknown(resolved(config), assumed(config, each), e)
    found = forecast(config, model, assumed(config, each))
    speed = work_per_second(pass_type(found.config, found.machine.device))
    more: list[tuple[str, str]] = []
    if config.optimization.hours:
        rates = rates_of(found.target, found.head, found.config, speed, bytes_per_second())
        coming = outlook(3600 * config.optimization.hours, config.optimization.epochs, rates)
        found = forecast(config, model, Tokens(coming.made, "what the target makes up in that time, by formula"))
        more = rows_of(found.config, rates, coming, curve_of(found.config.head.kind))
    text = as_text(found, speed, more)
    try:
        check(found)
    except EagleError as e:
        return f"{text}\nhere        {e}"
    disk = gb(free_disk(config.run.output))
    return f"{text}\nhere        fits, with {gb(found.machine.memory)} of memory and {disk} of disk free"


def check(found: Forecast) -> None:
    """Raise ConfigError or OutputError, with what would help, where memory or disk is too small."""
    check_fits(found.machine, found.target, found.head, found.config, found.states.place == "online")
    needed, folder = found.disk.heads + found.disk.checkpoints, found.config.run.output
    free = free_disk(folder)
    if needed > free:
        raise OutputError(
            f"{folder} will hold {gb(needed)} ({gb(found.disk.heads)} of heads, {gb(found.disk.checkpoints)} of states "
            f"to resume from), and {gb(free)} are free there; make room, name another --output, or keep fewer "
            "--checkpoints"
        )


def as_text(found: Forecast, speed: float, more: Sequence[tuple[str, str]] = ()) -> str:
    """The plan for people, a line for each thing, `more` of them at the end. `speed`: operations a second."""
    target, head, config, disk = found.target, found.head, found.config, found.disk
    read = ", ".join(map(str, (*head.aux_layers, f"{target.layers - 1} (for labels)")))
    drafts = f"{head.draft_vocab:,} of {target.vocab_size:,} tokens"
    span = _span(config, found.tokens)
    parts = f" in {config.optimization.accumulate} parts" if config.optimization.accumulate > 1 else ""
    name = str(pass_type(config, found.machine.device)).rpartition(".")[2]
    hours = estimate.hours(found.work, speed)
    rows = [
        (
            "target",
            f"{target.name}: {target.layers} layers of {target.hidden_size:,}, vocabulary {target.vocab_size:,}, "
            f"{_count(target.parameters)} parameters, {_count(target.used)} of them per token",
        ),
        ("head", f"{head.title}, {_count(head.parameters)} parameters; {config.optimization.unroll} draft steps"),
        ("layers", f"{read}, counted from 0"),
        ("vocabulary", f"drafts {drafts}"),
        ("data", ", ".join(config.data.shards or config.data.sources)),
        ("tokens", f"{found.tokens.count:,}: {found.tokens.how}"),
        ("run", f"{span}, {config.optimization.rows} rows of {config.optimization.length:,} tokens{parts}, in {name}"),
        ("memory", f"{gb(found.memory.total)}: {estimate.describe_memory(found.memory)}"),
        ("states", found.states.text),
        (
            "disk",
            f"{gb(disk.total)}: heads {gb(disk.heads)}, states to resume from {gb(disk.checkpoints)}"
            + (f", hidden states {gb(disk.states)}" if disk.states else ""),
        ),
    ]
    if not (config.optimization.minutes or config.optimization.hours or config.optimization.max_steps):
        rows.append(
            (
                "time",
                f"{found.work:.2g} operations; {_duration(hours)} on this machine, if half of the "
                f"{speed / 1e12:,.2f} TFLOP/s that it does now in {name} products are reached"
                + (", behind the making of conversations" if config.data.is_self else ""),
            )
        )
    return "\n".join(f"{name:<10}  {text}" for name, text in (*rows, *more))


def _states(
    config: TrainConfig, target: Target, shape: TargetShape, head: HeadShape, tokens: Tokens, machine: Machine
) -> CacheChoice:
    if config.data.shards:
        return CacheChoice("disk", 0, f"those in {', '.join(config.data.shards)}")
    meta = shard_meta(target, head.aux_layers, config.data.cache_bits)
    if config.data.states != "auto":
        return as_asked(config, tokens.count, meta)
    reserve = memory_on(machine, shape, head, config, online=False).total
    return choose_states(config, tokens.count, meta, reserve, machine.memory)


def _read(config: TrainConfig, model: Mapping[str, Any] | None) -> Target:
    """The target of a run that is not begun: a folder here, as it is described, or as the hub's config.json has it."""
    name = config.head.target
    if Path(name).expanduser().is_dir() or (model is None and hub.hub_id(name) is None):
        return config.loading.load(name, lazy=True)
    if model is None:
        model = _published(str(hub.hub_id(name)))
    return described_target(name, model)


def _published(repo: str) -> Mapping[str, Any]:
    """The fields of a model's config.json on the hub. Raises UnreachableError if the hub does not answer."""
    model = json.loads(hub.quick_file(repo, "config.json").read_text(encoding="utf-8"))
    how = model.get("quantization") or {}
    return {**model, "quantization": {key: how[key] for key in ("group_size", "bits", "mode") if key in how}}


def _described(name: str, recipe: Recipe | None) -> Mapping[str, Any] | None:
    """The fields of a target's config.json, from a recipe or the hub; None for a folder, which has its own."""
    repo = hub.hub_id(name)
    if repo is None or Path(name).expanduser().exists():
        return None
    model = described(recipe, name)
    if model is not None:
        return model
    try:
        return _published(repo)
    except hub.UnreachableError:
        model = described_by_name(name)
        if model is None:
            raise
        print(f"the hub cannot be reached: {repo} is planned as its recipe and its name describe it", file=sys.stderr)
        return model


def _unknown(config: TrainConfig, tokens: Tokens, error: EagleError) -> str:
    """The plan of a target of which nothing but the name is known."""
    steps = config.optimization
    rows = [
        ("target", f"{hub.hub_id(config.head.target)}, of which nothing is known here: {error}"),
        ("head", f"{config.head.kind}; {steps.unroll} draft steps"),
        ("data", ", ".join(config.data.shards or config.data.sources)),
        ("tokens", f"{tokens.count:,}: {tokens.how}"),
        ("run", f"{_span(config, tokens)}, {steps.rows} rows of {steps.length:,} tokens"),
        ("unknown", "layers, vocabulary, memory, disk and time: these need the target's config.json"),
    ]
    return "\n".join(f"{name:<10}  {text}" for name, text in rows)


def _span(config: TrainConfig, tokens: Tokens) -> str:
    """How long a run learns."""
    steps = max(1, round(tokens.count / (config.optimization.rows * config.optimization.length)))
    span = f"{counted(config.optimization.epochs, 'epoch')} of {counted(steps, 'step')}"
    if config.optimization.max_steps:
        span = counted(config.optimization.max_steps, "step")
    if config.optimization.minutes:
        span = f"{config.optimization.minutes:g} minutes"
    if config.optimization.hours:
        span = f"{config.optimization.hours:g} hours of making data and learning in turns"
    return span


def _count(number: int) -> str:
    return f"{number / 1e9:,.1f} billion" if number >= 1e9 else f"{number / 1e6:,.1f} million"


def _duration(hours: float) -> str:
    if hours >= 48:
        return f"about {hours / 24:,.0f} days"
    return f"about {hours:.1f} hours" if hours >= 1 else f"about {max(1, round(60 * hours))} minutes"
