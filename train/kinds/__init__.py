"""The kinds of heads that can be trained, and their defaults for settings."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from eagle_mlx.errors import ConfigError
from eagle_mlx.heads import kind_of as head_kind
from eagle_mlx.setting import find
from eagle_mlx.target import Target

from ..config import TrainConfig, TrainSettings, flag
from ..kind_settings import KIND_SETTINGS
from .base import Head, Kind, choose_trained, merged, parameters_of, trained_size

KINDS: dict[str, Kind[Any]] = {
    name: resolve_name(f"{__name__}.{kind.recipe}")() for name, kind in KIND_SETTINGS.items()
}
_RATE, _USUAL_WIDTH = 1e-4, 4096  # peak learning rate of AdamW for heads of targets with this hidden size
_ADAPTING = 1 / 3  # share of that rate to continue a trained head
_LARGEST = {"rows": 4, "length": 1024, "epochs": 1}  # for the most data; `plan.batches_for` chooses those for less
LARGEST_STEP = _LARGEST["rows"] * _LARGEST["length"]  # tokens


def kind_of(head: Head) -> Kind[Any]:
    return KINDS[head_kind(head).name]


def aux_layers_of(target: Target, config: TrainSettings, head: Head | None = None) -> tuple[int, ...]:
    """Return the target layers that `head`, or else a new head with these settings, reads, without the last."""
    return KINDS[config.head.kind].aux_layers(target, config) if head is None else head.named_layers


def check_supported(config: TrainConfig) -> None:
    """Raise ConfigError if the kind of head does not support a setting."""
    kind = config.head.kind
    for name, reason in KIND_SETTINGS[kind].foreign.items():
        if config.value(name) != find(TrainConfig, name).default:
            raise ConfigError(f"{flag(name)} cannot be used with --head {kind}: {reason}; leave {flag(name)} out")
    if config.head.lora_rank and not config.head.init_from:
        raise ConfigError("--lora-rank adapts an existing head: name it with --adapt")


def resolve(given: TrainConfig, width: int) -> TrainSettings:
    """Return what a run uses: the user's settings, else the kind's. `width`: the target's hidden size.

    Adam's best learning rate is inversely proportional to a network's width (Yang et al. 2022, arXiv 2203.03466, table
    3). The usual rate is 1e-4 for heads of targets with 8 billion parameters, which are 4,096 wide (SpecForge's
    scripts). Batches are those for much data, unless `plan.batches_for` chooses others.

    Raises ConfigError as `check_supported` does.
    """
    check_supported(given)
    usual = {"lr": _RATE * _USUAL_WIDTH / width, **_LARGEST, **KIND_SETTINGS[given.head.kind].defaults}
    if given.head.adapt:
        usual |= {"lr": _ADAPTING * usual["lr"], "rows": 1}  # there is little data, so steps are small
    own = {name: value for name, value in usual.items() if given.value(name) is None}
    if given.optimization.step_weights:
        own.pop("decay", None)
        own["unroll"] = len(given.optimization.step_weights)
    if given.head.init_from:
        for name in ("draft_vocab", "layers", "feature_norm", "recycle"):  # the loaded head determines these
            own.pop(name, None)
    if (given.head.layers or 1) > 1 and "recycle" in own:
        own["recycle"] = "output"  # its scale is what the copies of the target's layers expect
    if given.optimization.hours:
        own["states"] = "disk"  # hidden states are saved while data is made
    return TrainSettings.of(**{**given.flat(), **own})
