"""Compute a lower bound of a run's memory and disk from shapes, to refuse it before the target is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from eagle_mlx.data_pipelines import MakeConfig, beginning, steerable
from eagle_mlx.errors import ConfigError, OutputError
from eagle_mlx.memory import free_memory, gb
from eagle_mlx.target import Target, compute_dtype

from ..config import TrainConfig, flag
from ..data import free_disk
from ..kinds import KINDS, Head, choose_trained, resolved
from ..kinds.least_squares import bytes_of

FLOAT = 4
"""Bytes of a weight, moment or gradient in float32."""
PROGRAM = 250_000_000
"""Bytes used by Python and the libraries, without MLX's arrays."""
MOST = 0.95
"""Share of free memory that a run may use."""


@dataclass(frozen=True)
class Bound:
    """Lower bound of a run's memory and disk. Activations come on top; a probe measures them (`probe.py`)."""

    config: TrainConfig
    """The resolved settings."""
    target: Target
    """The target without weights; do not compute with it."""
    head: Head
    """The head without values, in its final shape."""

    @property
    def weights(self) -> int:
        """Bytes of the target's weights, in the dtype in which this machine computes."""
        dtype = compute_dtype()
        return sum(
            leaf.size * dtype.size if dtype is not None and mx.issubdtype(leaf.dtype, mx.floating) else leaf.nbytes
            for leaf in leaves(self.target.model.parameters())
        )

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        return sum(leaf.size for leaf in leaves(self.head.trainable_parameters()))

    @property
    def head_bytes(self) -> int:
        """Bytes of the head's weights in memory."""
        return sum(leaf.nbytes for leaf in leaves(self.head.parameters()))

    @property
    def training(self) -> int:
        """Bytes of the head's weights, gradients and moments, or of its linear start if that takes more."""
        moments = 2 if self.config.optimization.optimizer == "adamw" else 1
        return self.head_bytes + max((1 + moments) * FLOAT * self.trained, self._start)

    @property
    def memory(self) -> int:
        """Bytes of memory."""
        return self.weights + self.training + PROGRAM

    @property
    def heads_on_disk(self) -> int:
        """Bytes of `best` and `last`."""
        return 2 * self.head_bytes

    @property
    def checkpoints_on_disk(self) -> int:
        """Bytes of the checkpoints to resume from, including the one being written."""
        return (self.config.run.checkpoints + 1) * 3 * FLOAT * self.trained

    @property
    def _start(self) -> int:
        config = self.config.head
        if config.start != "linear" or config.init_from:
            return 0
        layers = self.head.named_layers
        width = max(1, len(layers)) * self.target.hidden_size + self.head.hidden_size
        return bytes_of(width, self.head.hidden_size)

    def check(self, free: int | None = None) -> None:
        """Raise ConfigError or OutputError, with remedies, if memory or disk is too small.

        `free` is in bytes and defaults to this machine's free memory.
        """
        free = free_memory() if free is None else free
        if self.memory > MOST * free:
            raise ConfigError(
                f"this run needs at least {gb(self.memory)} of memory (target {gb(self.weights)}, training "
                f"{gb(self.training)}, program {gb(PROGRAM)}), but {gb(free)} are free; use {self._remedy(free)}"
            )
        needed, folder = self.heads_on_disk + self.checkpoints_on_disk, self.config.run.output
        room = free_disk(folder)
        if needed > room:
            raise OutputError(
                f"{folder} needs {gb(needed)} ({gb(self.heads_on_disk)} of heads, {gb(self.checkpoints_on_disk)} "
                f"of checkpoints), but {gb(room)} are free there; free some space, choose another --output, or "
                "keep fewer --checkpoints"
            )

    def _remedy(self, free: int) -> str:
        foreign = KINDS[self.config.head.kind].foreign
        smaller = [] if self.weights + PROGRAM > MOST * free else ["intermediate_size", "draft_vocab"]
        own = [f"a smaller {flag(name)}" for name in smaller if name not in foreign]
        return " or ".join([*own, "a smaller or more strongly quantized --target"])


def bound_of(config: TrainConfig, target: Target | None = None) -> Bound:
    """Return the lower bound for a run with these settings.

    `target` has no weights; by default, it is created from the headers of its files, which are fetched if necessary.
    Raises ConfigError if the head does not fit the target, TargetError if the target cannot make up the data as
    configured, and EagleError if the target cannot be found.
    """
    config = resolved(config)
    target = target or config.loading.load(config.head.target, lazy=True)
    kind = KINDS[config.head.kind]
    kind.check(target, config)
    if config.data.is_self and target.tokenizer is not None:
        if target.tokenizer.has_chat_template:
            steerable(target.tokenizer, MakeConfig().domains, target.name)
        else:
            beginning(target.tokenizer, target.name)
    head = kind.blank(target, config)
    choose_trained(head, config)
    return Bound(config, target, head)


def leaves(tree: Any) -> list[mx.array]:
    """Return the arrays of a parameter tree."""
    return [leaf for _, leaf in cast("list[tuple[str, mx.array]]", tree_flatten(tree))]
