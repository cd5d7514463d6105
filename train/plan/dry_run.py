"""The output of `--dry-run`: a run's plan, and whether it fits on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from mlx_lm.utils import get_total_parameters

from eagle_mlx import hub
from eagle_mlx.catalog.models import described_target
from eagle_mlx.data_pipelines import read_conversations, shard_meta
from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.files import free_disk
from eagle_mlx.heads import KINDS
from eagle_mlx.memory import free_memory, gb
from eagle_mlx.progress import counted
from eagle_mlx.shards import ShardReader

from ..config import TrainConfig, TrainSettings, pass_type
from ..data import choose_states, prompt_config, self_file
from ..run import existing_head
from .batch_size import batches_for
from .memory import PROGRAM, Bound, Probe, bound_of, probe
from .recipe import Recipe

_COUNT = 10_000  # assumed conversations, if nothing is known about the data
_ANSWER = 500  # assumed tokens of a prompt with its answer
Tokens = tuple[int, str]  # the number of tokens of training data, and how it was estimated


def assumed(config: TrainConfig, tokens_each: int = Recipe.tokens_each) -> Tokens:
    """Return the amount of data: that of shards, else assumed without reading it."""
    if config.data.shards:
        return sum(ShardReader(folder).tokens for folder in config.data.shards), "in the shards"
    if config.data.prompts:
        return _prompts(config)
    count = config.data.limit or _COUNT
    length = min(tokens_each, config.data.max_length)
    if config.data.is_self:
        most = min(config.data.self_tokens, (config.data.limit or 0) * length or config.data.self_tokens)
        return most, f"conversations that the target writes first, in {self_file(config)}; set by --self-tokens"
    more = "" if config.data.limit else "; set by --limit"
    return count * length, f"{counted(count, 'conversation')} of {counted(length, 'token')}, assumed{more}"


def _prompts(config: TrainConfig) -> Tokens:
    """Return the amount of data of a run in which the target answers prompts; those of data sets are not counted."""
    reading = prompt_config(config)
    here = all(source.kind == "file" for source in reading.parsed)
    count = sum(1 for _ in read_conversations(reading, "train")) if here else config.data.limit or _COUNT
    about = f"{counted(count, 'prompt')} with answers of {_ANSWER:,}, assumed, and as many of older conversations"
    return 2 * count * min(_ANSWER, config.data.max_length), about


def plan_of(config: TrainConfig, recipe: Recipe | None = None) -> str:
    """Return the output of `--dry-run`: the plan, and a line on whether the run fits on this machine.

    No data is read; its amount is assumed. If the target's weights are local and fit, it is loaded and measured. Other
    plans have a lower bound of the memory, from the recipe or the hub's config.json. Raises ConfigError without a
    target, UnreachableError if neither a recipe nor the hub describes it.
    """
    if not config.head.target:
        raise ConfigError("no target: name the model with --target, or choose a --recipe")
    tokens = assumed(config, recipe.tokens_each if recipe is not None else Recipe.tokens_each)
    bound, here = _bound(config, recipe)
    try:
        bound.check()
        planned, measured = batches_for(bound.config, config, tokens[0]).config, None
        if here:
            target = config.loading.load(config.head.target)
            head = existing_head(target, planned)
            measured = probe(target, planned, head)
            bound = replace(bound, head=head or bound.head)
    except EagleError as e:
        return f"{as_text(bound, tokens)}\nhere        {e}"
    room = f"{gb(free_memory())} of memory and {gb(free_disk(config.run.output))} of disk free"
    return f"{as_text(bound, tokens, measured)}\nhere        fits, with {room}"


def as_text(bound: Bound, tokens: Tokens, measured: Probe | None = None, free: int | None = None) -> str:
    """Return the plan as text, one line per topic. `free` is in bytes and defaults to this machine's free memory."""
    target, head = bound.target, bound.head
    plan = batches_for(bound.config, bound.given, tokens[0], speed=measured)
    config = plan.config
    if plan.tokens != tokens[0]:
        tokens = plan.tokens, f"what {config.optimization.hours:g} hours allow at the measured speeds"
    title, step = KINDS[config.head.kind].title, config.optimization
    drafted = target.vocab_size if head.token_ids is None else head.token_ids.size
    read = ", ".join(map(str, (*head.named_layers, f"{target.num_layers - 1} (for labels)")))
    place, states, on_disk = _states(bound, tokens[0], measured, free_memory() if free is None else free)
    heads, checkpoints = bound.heads_on_disk, bound.checkpoints_on_disk
    adds = f", of which {_count(bound.trained)} are trained" if config.head.lora_rank else ""
    rows = {
        "target": f"{target.name}: {target.num_layers} layers of {target.hidden_size:,}, vocabulary "
        f"{target.vocab_size:,}, {_count(get_total_parameters(target.model))} parameters",
        "head": f"{title}, {_count(get_total_parameters(head))} parameters{adds}; {step.unroll} draft steps",
        **({"adapts": f"{config.head.adapt}, if the judge finds the result better"} if config.head.adapt else {}),
        "layers": f"{read}, counted from 0",
        "vocabulary": f"drafts {drafted:,} of {target.vocab_size:,} tokens",
        **_run_rows(config, tokens),
        **({"chosen": plan.about} if plan.about else {}),
        "memory": _memory(bound, measured),
        "states": states,
        "disk": f"{gb(heads + checkpoints + on_disk)}: heads {gb(heads)}, states to resume from {gb(checkpoints)}"
        + (f", hidden states {gb(on_disk)}" if on_disk else ""),
    }
    if not (step.minutes or step.hours or step.max_steps):
        rows["time"] = _time(config, tokens, measured, place == "online")
    elif measured is not None:
        rows["speed"] = str(measured)
    return "\n".join(f"{name:<10}  {text}" for name, text in rows.items())


def _run_rows(config: TrainSettings, tokens: Tokens) -> dict[str, str]:
    step = config.optimization
    steps = counted(max(1, round(tokens[0] / (step.rows * step.length))), "step")
    span = f"{counted(step.epochs, 'epoch')} of {steps}"
    if step.hours:
        span = f"{step.hours:g} hours, alternating between making data and learning"
    elif step.minutes:
        span = f"{step.minutes:g} minutes"
    elif step.max_steps:
        span = counted(step.max_steps, "step")
    parts = f" in {step.accumulate} parts" if step.accumulate > 1 else ""
    dtype = str(pass_type(config)).rpartition(".")[2]
    return {
        "data": ", ".join(config.data.shards or config.data.prompts or config.data.sources),
        "tokens": f"{tokens[0]:,}: {tokens[1]}",
        "run": f"{span}, {counted(step.rows, 'row')} of {step.length:,} tokens{parts}, in {dtype}; "
        f"learning rate {step.lr:.2g}, loss {step.loss}",
    }


def _states(bound: Bound, tokens: int, measured: Probe | None, free: int) -> tuple[str, str, int]:
    """Return the place of hidden states, a description, and their bytes on disk."""
    config, layers = bound.config, bound.head.named_layers
    if config.data.shards:
        return "disk", f"those in {', '.join(config.data.shards)}", 0
    meta = shard_meta(bound.target, layers, config.data.cache_bits)
    try:
        choice = choose_states(config, tokens, meta, measured.memory if measured else bound.memory, free)
    except EagleError as e:
        return config.data.states or "online", str(e), 0
    return choice.place, choice.text, choice.size if choice.place == "disk" else 0


def _memory(bound: Bound, measured: Probe | None) -> str:
    if measured is not None:
        whole = bound.weights + measured.memory + PROGRAM
        parts = f"training {gb(measured.memory)} at the peak of a step, program {gb(PROGRAM)}"
        return f"{gb(whole)} without hidden states: target {gb(bound.weights)}, {parts}"
    weights = gb(bound.head_bytes)
    return (
        f"at least {gb(bound.memory)}: target {gb(bound.weights)}, head {weights}, its gradients and moments (or its "
        f"linear start) {gb(bound.training - bound.head_bytes)}, program {gb(PROGRAM)}; a probe measures "
        "activations when the target is loaded"
    )


def _time(config: TrainSettings, tokens: Tokens, measured: Probe | None, online: bool) -> str:
    if measured is None:
        return "measured by a probe when the target is loaded"
    seconds = measured.seconds(tokens[0], config.optimization.epochs, online)
    writes = config.data.is_self or config.data.prompts
    after = ", after the target has written the conversations" if writes else ""
    return f"about {timedelta(minutes=1 + seconds // 60)} on this machine{after}: {measured}"


def _bound(config: TrainConfig, recipe: Recipe | None) -> tuple[Bound, bool]:
    """Return the bound, and whether the weights are local. Raises UnreachableError if the hub does not answer."""
    name = config.head.target
    repo = None if Path(name).expanduser().exists() else hub.hub_id(name)
    if repo is None or hub.cached(repo, whole=True) is not None:
        return bound_of(config), True
    is_own = recipe is not None and hub.hub_id(recipe.settings["target"]) == repo
    model = recipe.model if recipe is not None and is_own else _published(repo)
    return bound_of(config, described_target(name, model)), False


def _published(repo: str) -> Mapping[str, Any]:
    """Return the fields of a model's config.json on the hub. Raises UnreachableError if the hub does not answer."""
    model = json.loads(hub.fetch_file(repo, "config.json").read_text(encoding="utf-8"))
    form = model.get("quantization") or {}
    return {**model, "quantization": {key: form[key] for key in ("group_size", "bits", "mode") if key in form}}


def _count(number: int) -> str:
    return f"{number / 1e9:,.1f} billion" if number >= 1e9 else f"{number / 1e6:,.1f} million"
