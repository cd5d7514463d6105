"""One optimizer step: losses of all lanes, their gradients, clipping, update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map
from numpy.typing import NDArray

from eagle_mlx.errors import CheckpointError
from eagle_mlx.fastmath import on_cpu
from eagle_mlx.lanes import default_lanes, make_streams, one_blas_thread
from eagle_mlx.target import Target

from .batches import Rows
from .capture import capture_rows
from .config import TrainConfig
from .kinds import Head, kind_of, settled
from .losses import CROSS_ENTROPY, Objective, feature_losses, soft_labels, step_weights, unrolled_loss
from .noise import Noise, add_noise, noise_of
from .optimizers import Optimizers
from .plan import Plan, make_plan

_COMPILED_MULTIPLE = 256
"""Positions are padded to multiples of this where steps are compiled."""

_STEP, _OPTIMIZER = "step", "optimizer."

Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class StepResult:
    loss: float
    """The weighted mean of the draft steps' losses."""
    loss_by_step: list[float]
    accuracy_by_step: list[float]
    """Share of positions at which head and target have the same most likely token."""
    grad_norm: float
    """Before clipping."""
    tokens: int
    """Tokens of the batch that lie in a conversation."""
    loss_tokens: int
    """Positions that carried loss in the first draft step."""
    feature_loss_by_step: list[float] | None = None
    """The distance of the features, where it is part of the loss."""


class Stepper:
    """Trains a head step by step; holds the optimizer's state."""

    def __init__(self, head: Head, target: Target, config: TrainConfig):
        config = settled(config)
        head.attach(target)
        self.head, self._target, self._config = head, target, config
        self._weights = weights_of_steps(config)
        self._objective = objective_of(config)
        self._steps = 0
        self._optimizers = Optimizers(config, head.trainable_parameters())
        self._lanes = config.lanes or min(default_lanes(), config.rows)
        self._streams = make_streams(self._lanes)
        self._step: Callable[[list[Arrays]], list[mx.array]] = self._plain_step
        if not on_cpu():  # on a CPU a compiled step is the slower one
            self.compile()

    def compile(self) -> None:
        """Let MLX fuse the step's operations; a new shape of batch is compiled anew."""
        state = [self.head.state, self._optimizers.together.state]
        self._step = partial(mx.compile, inputs=state, outputs=state)(self._plain_step)

    def __call__(self, rows: Rows, factor: float) -> StepResult | None:
        """Learn from a batch at `factor` of the peak learning rates; None where it holds no loss."""
        parts = rows.split(self._lanes)
        multiple = 1 if on_cpu() else _COMPILED_MULTIPLE
        plans = [make_plan(part, len(self._weights), multiple) for part in parts]
        counts = np.sum([plan.counts for plan in plans], axis=0)
        if not counts[0]:
            return None
        scale = self._weights / np.maximum(counts, 1)
        noise = noise_of(rows, self._config.feature_noise, self._config.seed, self._steps)
        noises = noise.split(len(parts)) if noise else [None] * len(parts)
        self._steps += 1
        lanes = []
        for part, plan, noise, stream in zip(parts, plans, noises, self._streams, strict=False):
            with mx.stream(stream):
                lanes.append(lane_arrays(self.head, self._target, part, plan, scale, noise))
        self._optimizers.set_rates(factor)
        with one_blas_thread(self._lanes > 1):
            out = self._step(lanes)
            mx.eval(out, self.head.parameters(), self._optimizers.together.state)
        norm, loss, by_step, hits, *features = out
        return StepResult(
            float(np.array(loss)),
            (np.array(by_step) / self._weights).tolist(),
            (np.array(hits) / self._weights).tolist(),
            float(np.array(norm)),
            int((rows.segments > 0).sum()),
            int(counts[0]),
            (np.array(features[0]) / self._weights).tolist() if features else None,
        )

    def state(self) -> dict[str, mx.array]:
        """All that the next step depends on besides the head's weights and the batch, by name.

        `step` counts the updates; the rest is the optimizers'. A new Stepper that gets this back over a head with the
        same weights goes on bit by bit as this one would.
        """
        own = {_STEP: mx.array(self._steps, mx.int64)}
        return own | {f"{_OPTIMIZER}{name}": value for name, value in self._optimizers.arrays().items()}

    def restore(self, state: Mapping[str, mx.array]) -> None:
        """Go on from what `state` gave. Raises CheckpointError where it is of another head or optimizer."""
        if _STEP not in state:
            raise CheckpointError(f"the trainer's state has no {_STEP!r}; was it written by eagle-train?")
        others = {name.removeprefix(_OPTIMIZER): value for name, value in state.items() if name != _STEP}
        self._optimizers.restore(others)
        self._steps = int(np.array(state[_STEP]))

    def _lane_loss(self, arrays: Arrays) -> tuple[mx.array, ...]:
        return lane_loss(self.head, self._target, arrays, self._objective)

    def _plain_step(self, lanes: list[Arrays]) -> list[mx.array]:
        loss_and_grad = nn.value_and_grad(self.head, self._lane_loss)
        results, gradients = [], []
        for arrays, stream in zip(lanes, self._streams, strict=False):
            with mx.stream(stream):
                result, gradient = loss_and_grad(arrays)
            results.append(result)
            gradients.append(gradient)
        total = gradients[0]
        for gradient in gradients[1:]:
            total = tree_map(mx.add, total, gradient)
        clipped, norm = optim.clip_grad_norm(total, self._config.clip)
        self._optimizers.together.update(self.head, clipped)
        return [norm, *(sum(parts[1:], start=parts[0]) for parts in zip(*results, strict=True))]


def lane_arrays(
    head: Head, target: Target, rows: Rows, plan: Plan, scale: NDArray[np.float32], noise: Noise | None = None
) -> Arrays:
    """What a lane computes on; `scale` [S] is what a position counts for in each draft step."""
    aux_layers = kind_of(head).aux_layers_of(head)
    states = mx.array(rows.states) if rows.states is not None else capture_rows(target, aux_layers, rows)
    return {
        "tokens": mx.array(rows.tokens),
        "segments": mx.array(rows.segments),
        "states": states,
        "positions": mx.array(plan.positions),
        "labels": mx.array(plan.labels),
        "select": mx.array(plan.select),
        "weights": mx.array(plan.valid * scale[:, None]),
        **({"noise": mx.array(noise.sizes), "keys": mx.array(noise.keys)} if noise else {}),
    }


def lane_loss(head: Head, target: Target, arrays: Arrays, objective: Objective = CROSS_ENTROPY) -> tuple[mx.array, ...]:
    """The loss of some rows and what came of each draft step, as `unrolled_loss` has it.

    Where the distance of the features is part of the loss, it follows as [S].
    """
    kind, width = kind_of(head), target.hidden_size
    states, select, weights = arrays["states"], arrays["select"], arrays["weights"]
    last = states[..., -width:].reshape(-1, width)[arrays["labels"]].astype(target.dtype)
    labels = soft_labels(target, last, head.token_ids)
    g = kind.features(head, target, states, partial(add_noise, arrays))
    tokens = arrays["tokens"]
    embeddings = (head.embed_tokens(tokens) if head.config.own_embedding else target.embed(tokens)).astype(mx.float32)
    outputs = kind.unroll(head, embeddings, g, arrays["segments"], arrays["positions"], select.shape[0])
    loss, by_step, hits = unrolled_loss(head, outputs, labels, select, weights, objective.hard)
    if not objective.feature_weight:
        return loss, by_step, hits
    distances = feature_losses(outputs, target.norm(last).astype(mx.float32), select, weights)
    loss = objective.token_weight * loss + objective.feature_weight * mx.sum(distances)
    distances = mx.stop_gradient(distances)
    return loss, objective.token_weight * by_step + objective.feature_weight * distances, hits, distances


def weights_of_steps(config: TrainConfig) -> NDArray[np.float32]:
    """[S], what each draft step's mean loss counts for; they sum to 1."""
    given = np.array(config.step_weights)
    weights = given / given.sum() if len(given) else step_weights(config.unroll, config.decay)
    return np.array(weights, np.float32)


def objective_of(config: TrainConfig) -> Objective:
    feature, token = config.loss_weights or (0.0, 1.0)
    return Objective(config.loss == "hard", token, feature)
