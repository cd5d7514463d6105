"""Describe a head's training for a model card."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from eagle_mlx.progress import tokens_per_second

from ..config import SELF, TrainConfig, flag
from .bundle import public
from .source import Source

_LEFT_OUT = (
    *("target", "output", "overwrite", "wandb", "wandb_project", "checkpoints", "checkpoint_minutes"),
    *("states", "cache_bits", "cache_dir", "cache_gb"),
)
"""Settings that do not affect the head, and `target`, which is given by its public name."""
_NEEDED = "data"
"""Always shown without shards, because its default depends on the target."""
_DATA_SET = re.compile(r"([\w.-]+/[\w.-]+)(:[\w.-]+){0,2}")

Rows = list[tuple[str, str]]


def train_command(config: Mapping[str, Any], target: str) -> str:
    """Return a run's command line from its report, with the target's hub id and settings that are not defaults."""
    defaults = TrainConfig().flat()
    words = ["eagle-train", "--target", target]
    for name, value in config.items():
        default = defaults.get(name)
        plain = list(default) if isinstance(default, tuple) else default
        if name == _NEEDED and config.get("shards"):
            continue
        if name in _LEFT_OUT or (value == plain and name != _NEEDED) or value in ("", None, []):
            continue
        own = flag(name)
        shown = public(value, name)
        if isinstance(value, bool):
            words.append(own if value else f"--no-{own[2:]}")
        elif isinstance(value, list) and all(isinstance(item, str) for item in value):
            words += [word for item in shown for word in (own, item)]
        else:
            words += [own, *map(_plain, shown if isinstance(value, list) else [shown])]
    return shlex.join(words)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def data_sets(source: Source) -> list[str]:
    """Return the hub ids of the training data sets."""
    config = (source.report or {}).get("config") or {}
    if config.get("shards"):
        return []
    found = (_DATA_SET.fullmatch(name) for name in map(public, config.get("data") or ()))
    return [match.group(1) for match in found if match]


def training(source: Source) -> Rows:
    """Return the known facts about the training, as pairs of name and text."""
    if source.report is None:
        return _known([("steps", _number(source.noted.get("step"))), ("tokens", _number(source.noted.get("tokens")))])
    report = source.report
    config, data = report.get("config") or {}, report.get("data") or {}
    named = ["made up by the target" if name == SELF else str(name) for name in public(config.get("data") or [])]
    shards = public(config.get("shards") or [], "shards")
    sources = f"hidden states of {', '.join(shards)}" if shards else ", ".join(named)
    amount = _amount(data)
    chosen = report.get("best_step") if source.which == "best" else None
    steps = _number(report.get("steps"))
    return _known(
        [
            ("target", source.trained_on or ""),
            ("adapters of the target", source.adapter),
            ("started from", str(public(report.get("started_from") or ""))),
            ("data", sources + (f": {', '.join(amount)}" if amount else "")),
            ("tokens trained on", _number(report.get("tokens"))),
            ("steps", steps and f"{steps}{f', this checkpoint after {_number(chosen)}' if chosen else ''}"),
            ("time", _time(report)),
            ("time in all", f"{config['hours']:g} hours, including making the data" if config.get("hours") else ""),
            ("draft steps", _draft_steps(config)),
            ("optimizer", _optimiser(config)),
            ("batch", f"{config['rows']} rows of {config['length']} tokens" if config.get("rows") else ""),
            ("draft vocabulary", _vocabulary(data)),
            ("last loss", f"{report['loss']:.3f}" if report.get("loss") is not None else ""),
            ("seed", str(config["seed"]) if "seed" in config else ""),
        ]
    )


def _amount(data: Mapping[str, Any]) -> list[str]:
    """Return how much was learned from. Data that the run did not reach does not count."""
    keys = {"conversations": "conversations", "tokens": "tokens", "loss_tokens": "with loss"}
    if data.get("learned_tokens", data.get("tokens")) != data.get("tokens"):
        keys = {"learned_conversations": "conversations", "learned_tokens": "tokens"}
    return [f"{_number(data[key])} {what}" for key, what in keys.items() if data.get(key) is not None]


def _known(rows: Rows) -> Rows:
    return [(name, text) for name, text in rows if text]


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def _time(report: Mapping[str, Any]) -> str:
    seconds, rate = report.get("train_seconds"), report.get("tokens_per_second")
    if not seconds:
        return ""
    return f"{seconds / 60:,.1f} minutes" + (f", {tokens_per_second(rate)}" if rate else "")


def _draft_steps(config: Mapping[str, Any]) -> str:
    if not config.get("unroll"):
        return ""
    if config.get("step_weights"):
        return f"{config['unroll']}, weighted {' '.join(f'{weight:g}' for weight in config['step_weights'])}"
    return f"{config['unroll']}" + (
        f", each weighted {config['decay']:g} times the one before" if config.get("decay") else ""
    )


def _optimiser(config: Mapping[str, Any]) -> str:
    if not config.get("optimizer"):
        return ""
    rates = f"peak learning rate {config['lr']:g}" if config.get("lr") else ""
    if config["optimizer"] == "muon" and config.get("muon_lr"):
        rates += f", of Muon {config['muon_lr']:g}"
    return ", ".join(
        part for part in ({"adamw": "AdamW", "muon": "Muon and AdamW"}.get(config["optimizer"]), rates) if part
    )


def _vocabulary(data: Mapping[str, Any]) -> str:
    size, share = data.get("draft_vocab"), data.get("draft_vocab_coverage")
    return _number(size) + (f" tokens, {share:.1%} of the learned tokens" if size and share is not None else "")
