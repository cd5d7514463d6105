"""The kinds of heads that can be trained, and their defaults for settings."""

from __future__ import annotations

import math
from typing import Any

from eagle_mlx.errors import ConfigError
from eagle_mlx.heads import kind_of as known_kind
from eagle_mlx.target import Target

from ..config import TrainConfig, flag
from .base import Head, Kind
from .block import DFlashKind, DSparkKind
from .eagle3 import Eagle3Kind
from .eagle3.peagle import PEagleKind
from .last_layer import EagleKind, MTPKind
from .lora import choose_trained, merged, parameters_of

KINDS: dict[str, Kind[Any]] = {
    kind.name: kind for kind in (PEagleKind(), Eagle3Kind(), EagleKind(), MTPKind(), DFlashKind(), DSparkKind())
}
"""The kinds, by name."""
OPEN = TrainConfig().flat()
"""Default values of all settings. A setting with its default value counts as open."""
RATE, RATE_WIDTH = 1e-4, 4096
"""Peak learning rate of AdamW for heads of targets with this hidden size."""
RATE_STEP = 1024
"""Tokens of a step that this rate suits."""
_LARGEST = {"rows": 4, "length": 1024, "epochs": 1}
"""The open settings of batches that suit the most data; `plan.batches_for` chooses those for less."""
LARGEST_STEP = _LARGEST["rows"] * _LARGEST["length"]
"""Tokens."""

__all__ = [
    "KINDS",
    "LARGEST_STEP",
    "OPEN",
    "RATE_WIDTH",
    "Head",
    "Kind",
    "aux_layers_of",
    "choose_trained",
    "kind_of",
    "merged",
    "parameters_of",
    "resolved",
    "usual_rate",
]


def kind_of(head: Head) -> Kind[Any]:
    """Return the kind of an existing head. Raises ConfigError if it cannot be trained."""
    known = known_kind(head)
    if known.name in KINDS:
        return KINDS[known.name]
    raise ConfigError(f"{known.title} heads cannot be trained or adapted; the kinds that can are {', '.join(KINDS)}")


def aux_layers_of(target: Target, config: TrainConfig, head: Head | None = None) -> tuple[int, ...]:
    """Return the target layers that `head`, or else a new head with these settings, reads, without the last."""
    return KINDS[config.head.kind].aux_layers(target, config) if head is None else head.named_layers


def usual_rate(width: int, step: int = RATE_STEP) -> float:
    """Return AdamW's peak learning rate for heads of targets with hidden size `width`, in steps of `step` tokens.

    Adam's best rate is inversely proportional to a network's width (Yang et al. 2022, arXiv 2203.03466, table 3), and
    proportional to the square root of the batch size (Malladi et al. 2022, On the SDEs and Scaling Rules for Adaptive
    Gradient Algorithms, arXiv 2205.10287). The usual rate is 1e-4 for heads of targets with 8 billion parameters, which
    are 4,096 wide, in steps of one conversation of up to 2,048 tokens (SpecForge's run_qwen3_dense_eagle3_online.sh),
    about 1,024 on average. It does not rise for larger steps, because its scripts use it for those too.
    """
    return RATE * RATE_WIDTH / width * math.sqrt(min(1.0, step / RATE_STEP))


def resolved(config: TrainConfig, target: Target | None = None) -> TrainConfig:
    """Return the config with the kind's defaults for open settings. A resolved config does not change.

    Without a target, the batches and the learning rate stay open; with one, they are those for much data, unless
    `plan.batches_for` has chosen others.

    Raises ConfigError if the kind does not support a setting.
    """
    kind = KINDS[config.head.kind]
    for name, reason in kind.foreign.items():
        if config.value(name) != OPEN[name]:
            raise ConfigError(f"{flag(name)} cannot be used with --head {kind.name}: {reason}; leave {flag(name)} out")
    if config.head.lora_rank and not config.head.init_from:
        raise ConfigError("--lora-rank adapts an existing head: name it with --init-from, or leave --lora-rank out")
    own = {name: value for name, value in kind.defaults.items() if config.value(name) == OPEN[name]}
    if config.optimization.step_weights:
        own.pop("decay", None)
        own["unroll"] = len(config.optimization.step_weights)
    if config.head.init_from:
        for name in ("draft_vocab", "layers", "feature_norm", "recycle"):  # the loaded head determines these
            own.pop(name, None)
    if config.head.layers > 1 and "recycle" in own:
        own["recycle"] = "output"  # its scale is what the copies of the target's layers expect
    if config.optimization.hours:
        own["states"] = "disk"  # hidden states are saved while data is made
    if target is not None:
        own |= {name: value for name, value in _LARGEST.items() if not config.value(name)}
        step = (config.optimization.rows or own["rows"]) * (config.optimization.length or own["length"])
        own["lr"] = config.optimization.lr or usual_rate(target.hidden_size, step)
    return config.changed(**own)
