"""The head that training starts from: an existing one, or a new one."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from eagle_mlx.errors import ConfigError
from eagle_mlx.formats import load_head
from eagle_mlx.target import Target

from ..config import TrainConfig, flag
from ..data import TrainData
from ..kinds import KINDS, OPEN, Head, kind_of
from .linear_start import start_linear


def existing_head(target: Target, config: TrainConfig) -> Head | None:
    """The head that `config.head.init_from` names, ready for training; None where it names none.

    Its weights become float32. An embedding of its own stays as it is, as the field's trainers have it. Raises
    ConfigError for a head of another kind, and for settings that ask for another shape than the head has; and whatever
    loading raises.
    """
    if not config.head.init_from:
        return None
    loaded: Any = load_head(config.head.init_from, target)
    kind = kind_of(loaded)
    if kind.name != config.head.kind:
        raise ConfigError(f"{config.head.init_from} is an {kind.title} head; continue from it with --head {kind.name}")
    for name, has in kind.mismatches(loaded, config).items():
        asked = config.value(name)
        if asked not in (OPEN[name], has):
            raise ConfigError(
                f"{flag(name)} is {_text(asked)}, but {config.head.init_from} has {_text(has)}; "
                f"leave {flag(name)} out, or start without --init-from"
            )
    head: Head = kind.adopt(loaded)
    head.update(tree_map(_as_float32, head.parameters()))
    freeze_embedding(head)
    head.attach(target)
    mx.eval(head.parameters())
    return head


def new_head(target: Target, data: TrainData, config: TrainConfig, begin: bool = True) -> Head:
    """A new head for the data, which begins as the settings say; unless it is to `begin` at all, at random."""
    head: Head = KINDS[config.head.kind].new(target, config, data.kept, data.aux_layers)
    if begin and config.head.start == "linear":
        start_linear(head, target, data.samples, config.run.seed)
    return head


def freeze_embedding(head: nn.Module) -> None:
    """Leave a head's own embedding, where it has one, out of what is trained."""
    if "embed_tokens" in head:
        head["embed_tokens"].freeze()


def _as_float32(weight: mx.array) -> mx.array:
    return weight.astype(mx.float32) if mx.issubdtype(weight.dtype, mx.floating) else weight


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
