"""The optimizers of a head's weights, their state as named arrays, and the learning rate over a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.optimizers as optim

from eagle_mlx.errors import CheckpointError

from ..config import OptimizationConfig, TrainConfig

BETAS = [0.9, 0.95]
_AS_ADAMW = 0.2
"""The root mean square of AdamW's steps, in learning rates: Liu et al. 2025, "Muon is Scalable for LLM Training",
arXiv 2502.16982, section 2.2. speculators scales its Muon so."""


class Optimizers:
    """One optimizer for the head's inner matrices and one for all else."""

    def __init__(self, config: OptimizationConfig, parameters: dict[str, Any]):
        self._peaks = make_optimizers(config)
        self.together = optim.MultiOptimizer(list(self._peaks), [is_inner_matrix])
        self.together.init(parameters)

    def set_rates(self, factor: float) -> None:
        """`factor` of the peak learning rates, each its own."""
        for optimizer, peak in self._peaks.items():
            optimizer.learning_rate = mx.array(peak * factor)

    def arrays(self) -> dict[str, mx.array]:
        """All that the optimizers know, by name: `0.` the inner matrices' and `1.` the others'."""
        return {name: holder[key] for name, holder, key in self._places()}

    def restore(self, arrays: Mapping[str, mx.array]) -> None:
        """Put back what `arrays` gave. Raises CheckpointError where names or shapes are not this head's."""
        places = list(self._places())
        names = {name for name, _, _ in places}
        if names != arrays.keys():
            odd = sorted(names ^ arrays.keys())
            raise CheckpointError(
                f"the optimizer's state is of another head or optimizer: {odd[0]} and {len(odd) - 1} more are in one "
                "alone; resume with the settings that the run began with"
            )
        for name, holder, key in places:
            if holder[key].shape != arrays[name].shape:
                raise CheckpointError(
                    f"{name} of the optimizer's state has the shape {arrays[name].shape} and not {holder[key].shape}; "
                    "resume with the settings that the run began with"
                )
        for name, holder, key in places:  # in place: a compiled step holds on to these containers
            holder[key] = arrays[name].astype(holder[key].dtype)

    def _places(self) -> Iterator[tuple[str, Any, Any]]:
        for number, state in enumerate(self.together.state["states"]):
            yield from _places(state, str(number))


def _places(tree: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """The name of each array in a tree of dicts and lists, what holds it, and under which key."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if isinstance(value, mx.array):
            yield f"{name}.{key}", tree, key
        else:
            yield from _places(value, f"{name}.{key}")


def make_optimizers(config: OptimizationConfig) -> dict[optim.Optimizer, float]:
    """The optimizer of the head's inner matrices and that of all else, with their peak learning rates."""

    def adamw() -> optim.Optimizer:
        return optim.AdamW(config.lr, betas=BETAS, weight_decay=config.weight_decay, bias_correction=True)

    if config.optimizer == "adamw":
        return {adamw(): config.lr, adamw(): config.lr}
    if config.muon_lr:
        return {optim.Muon(config.muon_lr, weight_decay=0.0): config.muon_lr, adamw(): config.lr}
    return {MatchedMuon(config.lr, weight_decay=0.0): config.lr, adamw(): config.lr}


class MatchedMuon(optim.Muon):
    """Muon whose steps are as large as AdamW's at the same learning rate, whatever a matrix's shape."""

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        """The parameter [A, B] after a step of `_AS_ADAMW * sqrt(max(A, B))` learning rates along an orthogonal one."""
        rows, columns = gradient.shape
        by_mlx = max(1.0, rows / columns) ** 0.5
        rate = self.learning_rate
        self.learning_rate = rate * (_AS_ADAMW * max(rows, columns) ** 0.5 / by_mlx)
        moved: mx.array = super().apply_single(gradient, parameter, state)
        self.learning_rate = rate
        return moved


def is_inner_matrix(path: str, weight: Any) -> bool:
    """Whether a weight is a matrix between hidden states, which is what Muon is for."""
    return bool(weight.ndim == 2) and not path.startswith(("lm_head", "embed_tokens"))


def learning_rate_factor(progress: float, warmup: float, final: float) -> float:
    """Share of the peak learning rate at `progress` in [0, 1]: a linear rise over `warmup`, then half a cosine."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return progress / warmup
    fall = (progress - warmup) / (1 - warmup) if warmup < 1 else 1.0
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * fall))


class Schedule(Protocol):
    """How long a run learns, and how fast at each time. Steps count from 0, `elapsed` are seconds of the run."""

    @property
    def seconds(self) -> float:
        """The second at which it is over; 0 where steps alone say so."""
        ...

    @property
    def steps(self) -> int: ...

    def progress(self, step: int, elapsed: float) -> float:
        """Where it stands, 0 to 1."""
        ...

    def is_over(self, step: int, elapsed: float) -> bool: ...

    def factor(self, step: int, elapsed: float, warmup: float, final: float) -> float:
        """Share of the peak learning rate; `warmup` and `final` as in the settings."""
        ...


@dataclass(frozen=True)
class Cosine:
    """A run over a time or a number of steps, whose rate falls as half a cosine."""

    seconds: float = 0.0
    steps: int = 0

    def progress(self, step: int, elapsed: float) -> float:
        """Where the run stands, 0 to 1, as it begins step `step` (from 0) after `elapsed` seconds."""
        return elapsed / self.seconds if self.seconds else (step + 0.5) / self.steps

    def is_over(self, step: int, elapsed: float) -> bool:
        return elapsed >= self.seconds if self.seconds else step >= self.steps

    def factor(self, step: int, elapsed: float, warmup: float, final: float) -> float:
        return learning_rate_factor(self.progress(step, elapsed), warmup, final)


_DECAY = 0.4
"""Share of the last phase over which the rate falls. That phase is half of all learning, so this is the fifth of a run
with which Haegele et al. (2024, arXiv 2405.18392) reach the loss of a cosine."""


@dataclass(frozen=True)
class WarmupStableDecay:
    """Learning between two makings of data: until a step, the last one until a time.

    The rate rises over `warmup` of the run's time, counted in time of learning. Then it stays, so that data can be
    added, and in the last phase it falls as one minus a square root (Haegele et al. 2024, arXiv 2405.18392).
    """

    begins: float
    """Second of the run."""
    seconds: float
    """Second of the run by which it is over."""
    steps: int = 0
    """Step by which it is over; 0 for the time alone."""
    before: float = 0.0
    """Seconds of learning before it."""
    total: float = 0.0
    """Seconds of the whole run."""
    last: bool = False

    def progress(self, step: int, elapsed: float) -> float:
        """Nothing within a phase goes by its share."""
        return 0.0

    def is_over(self, step: int, elapsed: float) -> bool:
        return elapsed >= self.seconds or bool(self.steps and step >= self.steps)

    def factor(self, step: int, elapsed: float, warmup: float, final: float) -> float:
        learnt = self.before + elapsed - self.begins
        rise = min(1.0, learnt / (warmup * self.total)) if warmup else 1.0
        if not self.last:
            return rise
        window = max(_DECAY * (self.seconds - self.begins), 1e-9)
        fallen = math.sqrt(min(max(1 - (self.seconds - elapsed) / window, 0.0), 1.0))
        return rise * (final + (1 - final) * (1 - fallen))


def span_of(config: TrainConfig, steps_per_epoch: int) -> Cosine:
    """Minutes where they are given, else steps, else epochs."""
    if config.optimization.minutes:
        return Cosine(seconds=60 * config.optimization.minutes)
    return Cosine(steps=config.optimization.max_steps or config.optimization.epochs * steps_per_epoch)
