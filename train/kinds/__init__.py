"""The kinds of heads that can be trained, and what each makes of settings that are left open."""

from __future__ import annotations

from typing import Any

from eagle_mlx.errors import ConfigError
from eagle_mlx.target import Target

from ..config import TrainConfig, flag
from .base import Head, Kind, freeze_embedding
from .eagle import EagleKind
from .eagle3 import Eagle3Kind
from .mtp import MTPKind

KINDS: dict[str, Kind[Any]] = {kind.name: kind for kind in (Eagle3Kind(), EagleKind(), MTPKind())}
"""The recipe of each kind of head, by the kind's name."""
OPEN = TrainConfig().flat()
"""What a setting is where nothing was said of it."""
RATE, RATE_WIDTH = 1e-4, 4096
"""The peak learning rate of AdamW for heads of targets of a width."""

__all__ = ["KINDS", "OPEN", "Head", "Kind", "aux_layers_of", "freeze_embedding", "kind_of", "resolved"]


def kind_of(head: object) -> Kind[Any]:
    """The kind of a head that exists. Raises ConfigError for one that cannot be trained."""
    for kind in KINDS.values():
        if isinstance(head, kind.head_class):
            return kind
    raise ConfigError(f"a {type(head).__name__} cannot be trained; known are {', '.join(KINDS)}")


def aux_layers_of(target: Target, config: TrainConfig, head: object = None) -> tuple[int, ...]:
    """The target's layers, besides the last one, that a head reads: a new one of these settings, or one that exists."""
    return KINDS[config.head.kind].aux_layers(target, config) if head is None else kind_of(head).aux_layers_of(head)


def resolved(config: TrainConfig, target: Target | None = None) -> TrainConfig:
    """The config with the kind's own values where it was left open; one that is resolved already stays as it is.

    The learning rate follows the target's width, and stays open where no target is given. The best one of Adam is
    inverse to the width of a network (Yang et al. 2022, arXiv 2203.03466, table 3). The field's is 1e-4 for heads of
    targets of 8 billion parameters, which are 4,096 wide (SpecForge's scripts).

    Raises ConfigError for a setting that the kind has no use for.
    """
    kind = KINDS[config.head.kind]
    for name, reason in kind.foreign.items():
        if config.value(name) != OPEN[name]:
            raise ConfigError(f"{flag(name)} is not for --head {kind.name}: {reason}; leave {flag(name)} out")
    own = {name: value for name, value in kind.defaults.items() if config.value(name) == OPEN[name]}
    if config.optimization.step_weights:
        own.pop("decay", None)
        own["unroll"] = len(config.optimization.step_weights)
    if config.head.init_from:
        for name in ("draft_vocab", "feature_norm", "recycle"):  # as the head has it
            own.pop(name, None)
    if config.head.layers > 1 and "recycle" in own:
        own["recycle"] = "output"  # which has the size that the copies of the target's layers read
    if config.optimization.hours:
        own["states"] = "disk"  # what is made is captured on to it
    if target is not None and not config.optimization.lr:
        own["lr"] = RATE * RATE_WIDTH / target.hidden_size
    return config.changed(**own)
