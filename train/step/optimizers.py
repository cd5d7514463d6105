"""Optimizers, their state as named arrays, and learning rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from ..config import ChosenOptimization, TrainSettings

_AS_ADAMW = 0.2
"""Root mean square of AdamW's updates, relative to the learning rate: Liu et al. 2025, "Muon is Scalable for LLM
Training", arXiv 2502.16982, section 2.2. speculators scales its Muon the same way."""


class Optimizers:
    """Two optimizers: one for the head's inner matrices, and one for all other weights."""

    def __init__(self, config: ChosenOptimization, parameters: dict[str, Any]):
        def adamw() -> optim.Optimizer:
            return optim.AdamW(config.lr, betas=[0.9, 0.95], weight_decay=config.weight_decay, bias_correction=True)

        inner, peak = adamw(), config.lr
        if config.optimizer == "muon" and config.muon_lr:
            inner, peak = optim.Muon(config.muon_lr, weight_decay=0.0), config.muon_lr
        elif config.optimizer == "muon":
            inner = MatchedMuon(config.lr, weight_decay=0.0)
        self._peaks: dict[optim.Optimizer, float] = {inner: peak, adamw(): config.lr}
        self.together = optim.MultiOptimizer(list(self._peaks), [is_inner_matrix])
        self.together.init(parameters)

    def set_rates(self, factor: float) -> None:
        for optimizer, peak in self._peaks.items():
            optimizer.learning_rate = mx.array(peak * factor)

    def arrays(self) -> dict[str, mx.array]:
        """Return the optimizers' state by name, with prefix `0.` for the inner matrices and `1.` for the others."""
        return {name: holder[key] for name, holder, key in _places(self.together.state["states"])}

    def restore(self, arrays: Mapping[str, mx.array]) -> None:
        # in place: a compiled step keeps references to these containers
        for name, holder, key in _places(self.together.state["states"]):
            holder[key] = arrays[name].astype(holder[key].dtype)


def _places(tree: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, container and key of each array in a tree of dicts and lists."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, mx.array):
            yield f"{name}{key}", tree, key
        else:
            yield from _places(value, f"{name}{key}.")


class MatchedMuon(optim.Muon):
    """Muon with updates as large as AdamW's at the same learning rate, for matrices of any shape."""

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        """Return the parameter [A, B] after an orthogonal update scaled by `_AS_ADAMW * sqrt(max(A, B))`."""
        rows, columns = gradient.shape
        by_mlx = max(1.0, rows / columns) ** 0.5
        rate = self.learning_rate
        self.learning_rate = rate * (_AS_ADAMW * max(rows, columns) ** 0.5 / by_mlx)
        moved: mx.array = super().apply_single(gradient, parameter, state)
        self.learning_rate = rate
        return moved


_BY_TOKEN = (
    *("lm_head.", "embed_tokens.", "markov_head.markov_w1.", "markov_head.markov_w2."),
    *("candidate_selector.predecessor_codebook.", "candidate_selector.successor_codebook."),
)
"""Weights with a row for each token of a vocabulary, by how their names begin."""


def is_inner_matrix(path: str, weight: Any) -> bool:
    """Return whether Muon is made for a weight: a matrix between hidden states (Jordan et al. 2024)."""
    return bool(weight.ndim == 2) and min(weight.shape) > 1 and not path.startswith(_BY_TOKEN)


def learning_rate_factor(progress: float, warmup: float, final: float) -> float:
    """Return the share of the peak learning rate at `progress` in [0, 1]: linear warmup, then half a cosine."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return progress / warmup
    fall = (progress - warmup) / (1 - warmup) if warmup < 1 else 1.0
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * fall))


@dataclass(frozen=True)
class Cosine:
    """A run with a time limit, a number of steps, or whichever is over first, and a learning rate that falls like half
    a cosine."""

    seconds: float = math.inf  # second of the run at which it is over
    steps: float = math.inf

    def progress(self, step: int, elapsed: float) -> float:
        """Return the progress, from 0 to 1, at the start of step `step` after `elapsed` seconds."""
        return max(elapsed / self.seconds, (step + 0.5) / self.steps)

    def is_over(self, step: int, elapsed: float) -> bool:
        return elapsed >= self.seconds or step >= self.steps

    def factor(self, step: int, elapsed: float, warmup: float, final: float) -> float:
        """Return the share of the peak learning rate. `warmup` and `final` are as in the settings."""
        return learning_rate_factor(self.progress(step, elapsed), warmup, final)


_DECAY = 0.4
"""Share of the last phase over which the learning rate falls. That phase is half of all learning, so this is the fifth
of a run with which Haegele et al. (2024, arXiv 2405.18392) match the loss of a cosine schedule."""


@dataclass(frozen=True)
class WarmupStableDecay:
    """A learning phase in a run that also makes data. It ends at a step or time, and the last phase only at a time.

    The learning rate rises while the time spent learning is below `warmup` times the run's length. Then it is constant,
    so that data can be added. In the last phase it falls like one minus a square root (Haegele et al. 2024, arXiv
    2405.18392).
    """

    begins: float  # second of the run at which the phase begins
    seconds: float  # second of the run by which the phase is over
    steps: int  # step by which the phase is over; 0 if only the time counts
    before: float  # seconds of learning before the phase
    total: float  # seconds of the whole run
    last: bool

    def progress(self, step: int, elapsed: float) -> float:
        """Return 0: nothing depends on progress within a phase."""
        return 0.0

    def is_over(self, step: int, elapsed: float) -> bool:
        return elapsed >= self.seconds or bool(self.steps and step >= self.steps)

    def factor(self, step: int, elapsed: float, warmup: float, final: float) -> float:
        learned = self.before + elapsed - self.begins
        rise = min(1.0, learned / (warmup * self.total)) if warmup else 1.0
        if not self.last:
            return rise
        window = max(_DECAY * (self.seconds - self.begins), 1e-9)
        fallen = math.sqrt(min(max(1 - (self.seconds - elapsed) / window, 0.0), 1.0))
        return rise * (final + (1 - final) * (1 - fallen))


Schedule = Cosine | WarmupStableDecay  # of a run or phase. Steps count from 0; `elapsed` is in seconds of the run


def span_of(config: TrainSettings, steps_per_epoch: int) -> Cosine:
    """Return a plain run's schedule: by minutes and steps, as far as they are given, else by epochs."""
    step = config.optimization
    if step.minutes:
        return Cosine(60 * step.minutes, step.max_steps or math.inf)
    return Cosine(steps=step.max_steps or step.epochs * steps_per_epoch)
