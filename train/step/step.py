"""The optimizer step: losses and gradients of all streams, clipping, and the update."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map, tree_unflatten
from numpy.typing import NDArray

from eagle_mlx.blas import one_blas_thread
from eagle_mlx.cpu import default_streams, make_streams, use_shortcuts
from eagle_mlx.errors import EagleError
from eagle_mlx.formats.tensors import EXACT, arrays_of
from eagle_mlx.hidden_states import from_16_bits, last_of
from eagle_mlx.memory import FreedBuffers
from eagle_mlx.target import Target

from ..config import TrainSettings, pass_type
from ..data import Rows, capture_rows
from ..distributed import SINGLE_PROCESS, World
from ..kinds import KINDS, Head, kind_of
from ..kinds.block import with_latents
from ..unroll import Inputs, holding, weights_but
from .inputs import InputPlan, add_noise, make_anchor_plan, make_plan, noise_of
from .losses import CROSS_ENTROPY, ChunkedLoss, Objective, feature_losses
from .optimizers import Optimizers

_STEP, _OPTIMIZER = "step", "optimizer."

Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class StepResult:
    loss: float  # the weighted mean of the draft steps' losses
    loss_by_step: list[float]
    accuracy_by_step: list[float]  # share of positions for which head and target have the same most likely token
    grad_norm: float  # norm of the gradient before clipping
    tokens: int  # tokens of the batch, without padding
    loss_tokens: int  # positions with loss in the first draft step
    feature_loss_by_step: list[float] | None = None  # the feature distance, if it is part of the loss


class NotFiniteError(EagleError):
    """Raised before a step that would make the weights NaN or infinite."""


@dataclass(frozen=True)
class _Part:
    """The part of a batch that one stream computes."""

    rows: Rows
    plan: InputPlan
    noise: dict[str, NDArray[Any]]


class Stepper:
    """Takes steps and owns the optimizer's state. The processes of a `world` take each step on different rows.

    They must `sync` before the first step.
    """

    def __init__(self, head: Head, target: Target, config: TrainSettings, world: World = SINGLE_PROCESS):
        head.attach(target)
        self.head, self._target = head, target
        self._config, self._world = config, world
        self._weights, self._objective = weights_of_steps(config), objective_of(config)
        self._steps = 0
        self._optimizers = Optimizers(config.optimization, head.trainable_parameters())
        self._streams = make_streams(config.run.streams or min(default_streams(), config.optimization.rows))
        self._freed = FreedBuffers()
        self._gradients: Callable[[list[Arrays]], tuple[list[mx.array], Any]] = self._plain_gradients
        self._update: Callable[[Any], None] = self._plain_update
        if not use_shortcuts():  # on a CPU, compiled steps are slower
            self.compile()

    def compile(self) -> None:
        """Let MLX fuse the step's operations. Each new batch shape is compiled again."""
        state = [self.head.state, self._optimizers.together.state]
        self._gradients = partial(mx.compile, inputs=state[:1], outputs=state[:1])(self._plain_gradients)
        self._update = partial(mx.compile, inputs=state, outputs=state)(self._plain_update)

    def __call__(self, rows: Rows, factor: float) -> StepResult | None:
        """Take a step on a batch at `factor` times the peak learning rates. Return None if it has no loss.

        `rows` are this process's, and the result covers all processes. Raises NotFiniteError, before weights change,
        if loss or gradient are not finite.
        """
        groups = self._parts(rows)
        counts = np.zeros(len(self._weights), np.int64)
        for part in itertools.chain(*groups):
            counts += part.plan.counts.astype(np.int64)
        *counted, tokens = self._world.all_sum(np.array([*counts, (rows.segments > 0).sum()])).tolist()
        if not counted[0]:
            return None
        scale = (self._weights / np.maximum(counted, 1)).astype(np.float32)
        self._steps += 1
        self._optimizers.set_rates(factor)
        with one_blas_thread(len(self._streams) > 1):
            norm, loss, by_step, hits, *features = self._learn(groups, scale)
        self._freed.after_step()
        return StepResult(
            float(np.array(loss)),
            (np.array(by_step) / self._weights).tolist(),
            (np.array(hits) / self._weights).tolist(),
            float(np.array(norm)),
            tokens,
            counted[0],
            (np.array(features[0]) / self._weights).tolist() if features else None,
        )

    def _parts(self, rows: Rows) -> list[list[_Part]]:
        """Return sequential groups of parts that run in parallel, without parts that have no loss."""
        multiple = 1 if use_shortcuts() else 256  # compiled steps have fewer shapes
        size, seed = self._config.optimization.feature_noise, self._config.run.seed

        def part_of(part: Rows) -> _Part:
            steps, kind = len(self._weights), kind_of(self.head)
            if kind.in_blocks:
                plan = make_anchor_plan(part, steps, seed, self._steps, multiple, kind.share)
            else:
                plan = make_plan(part, steps, multiple)
            return _Part(part, plan, noise_of(part, size, seed, self._steps))

        groups = [
            map(part_of, group.split(len(self._streams))) for group in rows.split(self._config.optimization.accumulate)
        ]
        with_loss = [[part for part in group if part.plan.counts[0]] for group in groups]
        return [group for group in with_loss if group]

    def _learn(self, groups: list[list[_Part]], scale: NDArray[np.float32]) -> list[mx.array]:
        """Update the weights. Return the gradient's norm and the results, summed over groups and processes."""
        total = self._accumulate(groups, scale)
        if self._world.size > 1:
            mx.eval(total)
            total = self._world.all_sum_tree(list(total))
        results, gradient = total
        clipped, norm = optim.clip_grad_norm(gradient, self._config.optimization.clip)
        mx.eval(norm, results)
        loss, length = float(np.array(results[0])), float(np.array(norm))
        if not (math.isfinite(loss) and math.isfinite(length)):
            self._steps -= 1
            raise NotFiniteError(f"the loss is {loss} and the gradient's norm {length}")
        self._update(clipped)
        del total, gradient, clipped  # so that the update can reuse their memory
        for weight in arrays_of(self.head.parameters()).values():
            mx.eval(weight)  # one at a time, to limit temporary memory
        mx.eval(self._optimizers.together.state)
        return [norm, *results]

    def _accumulate(self, groups: list[list[_Part]], scale: NDArray[np.float32]) -> Any:
        """Return the sums of results and gradients over all groups."""
        total: Any = None
        for group in groups:
            parts = []
            for part, stream in zip(group, self._streams, strict=False):
                with mx.stream(stream):
                    parts.append(part_arrays(self.head, self._target, part.rows, part.plan, scale, part.noise))
            sums = self._gradients(parts)
            total = sums if total is None else tree_map(mx.add, total, sums)
            del sums, parts
            if len(groups) > 1:
                mx.eval(total)  # before the next group allocates memory
        if total is not None:
            return total
        by_step = mx.zeros(len(self._weights))
        results = [mx.array(0.0), by_step, by_step, *([by_step] if self._objective.feature_weight else [])]
        return results, tree_map(mx.zeros_like, self.head.trainable_parameters())

    def sync(self) -> None:
        """Broadcast rank 0's head and state exactly."""
        if self._world.size == 1:
            return
        weights = self._world.broadcast_arrays(arrays_of(self.head.trainable_parameters()))
        self.head.update(tree_unflatten(list(weights.items())))
        self.restore(self._world.broadcast_arrays(self.state()))

    def state(self) -> dict[str, mx.array]:
        """Return the state by name. A new Stepper with it, and with the same weights, continues exactly as this one."""
        own = {_STEP: mx.array(self._steps, mx.int64)}
        return own | {f"{_OPTIMIZER}{name}": value for name, value in self._optimizers.arrays().items()}

    def restore(self, state: Mapping[str, mx.array]) -> None:
        self._optimizers.restore({name.removeprefix(_OPTIMIZER): value for name, value in state.items()})
        self._steps = int(np.array(state[_STEP]))

    def _plain_gradients(self, parts: list[Arrays]) -> tuple[list[mx.array], Any]:
        """Return the sums of results and gradients over all parts."""
        loss_and_grad = nn.value_and_grad(self.head, self._part_loss)
        sums = []
        for arrays, stream in zip(parts, self._streams, strict=False):
            with mx.stream(stream):
                result, gradient = loss_and_grad(arrays)
            sums.append((list(result), gradient))
        total: tuple[list[mx.array], Any] = reduce(partial(tree_map, mx.add), sums)
        return total

    def _part_loss(self, arrays: Arrays) -> tuple[mx.array, ...]:
        again, dtype = self._config.optimization.grad_checkpoint, pass_type(self._config)
        return part_loss(self.head, self._target, arrays, self._objective, again, dtype)

    def _plain_update(self, gradient: Any) -> None:
        self._optimizers.together.update(self.head, gradient)


def part_arrays(
    head: Head,
    target: Target,
    rows: Rows,
    plan: InputPlan,
    scale: NDArray[np.float32],
    noise: Mapping[str, NDArray[Any]] | None = None,
) -> Arrays:
    """Return the arrays of one part of a batch. `scale` [S]: weight of a position in each draft step."""
    captured = rows.states
    states = capture_rows(target, head.named_layers, rows) if captured is None else from_16_bits(captured)
    of_rows = {"tokens": rows.tokens, "segments": rows.segments, **(noise or {})}
    of_plan = {"positions": plan.positions, "labels": plan.labels, "select": plan.select}
    weights = {"weights": plan.valid * scale[:, None]}
    return {"states": states, **{name: mx.array(value) for name, value in (of_rows | of_plan | weights).items()}}


def part_loss(
    head: Head,
    target: Target,
    arrays: Arrays,
    objective: Objective = CROSS_ENTROPY,
    grad_checkpoint: bool = False,
    dtype: mx.Dtype = mx.float32,
) -> tuple[mx.array, ...]:
    """Return a part's loss, and the losses and hits of each draft step as in `ChunkedLoss`.

    If the feature distance is part of the loss, it follows as [S]. `grad_checkpoint` saves memory by recomputing values
    for the gradient, with the same results. The head computes in `dtype`.
    """
    with in_pass_type(head, dtype):
        kind, width = kind_of(head), target.hidden_size
        states, select, weights = arrays["states"], arrays["select"], arrays["weights"]
        last = last_of(states, width).reshape(-1, width)[arrays["labels"]].astype(target.dtype)

        def noisy(read: mx.array) -> mx.array:
            return (add_noise(arrays, read) if "noise" in arrays else read).astype(dtype)

        features = kind.features(head, target, states, noisy)
        tokens = arrays["tokens"]
        embeddings = head.embed(tokens).astype(dtype)
        inputs = Inputs(embeddings, features, arrays["segments"], arrays["positions"])
        outputs = kind.unroll(head, inputs, select.shape[0], grad_checkpoint)
        if "markov_head" in head or "candidate_selector" in head:
            outputs = with_latents(head, outputs, tokens, arrays["positions"])
        loss, by_step, hits = ChunkedLoss(head, target, last, weights, objective)(outputs, select)
        if not objective.feature_weight:
            return loss, by_step, hits
        distances = feature_losses(outputs, target.norm(last).astype(mx.float32), select, weights)
        loss = loss + objective.feature_weight * mx.sum(distances)
        distances = mx.stop_gradient(distances)
        return loss, by_step + objective.feature_weight * distances, hits, distances


def weights_of_steps(config: TrainSettings) -> NDArray[np.float32]:
    """Return the weight [S] of each draft step's mean loss: as given, or decay**j for step j. They sum to 1."""
    loss = config.optimization
    weights = np.array(loss.step_weights or [(loss.decay or 0.0) ** step for step in range(loss.unroll)])
    return np.array(weights / weights.sum(), np.float32)


def objective_of(config: TrainSettings) -> Objective:
    kind = KINDS[config.head.kind]
    apart, token = config.optimization.loss_weights or (0.0, 1.0)
    feature, variation = (0.0, apart) if kind.in_blocks else (apart, 0.0)
    others = variation, kind.confidence_weight, kind.selector_weight, feature
    return Objective(config.optimization.loss, token, *others)


def in_pass_type(head: nn.Module, dtype: mx.Dtype) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that casts the head's trainable weights. Gradients reach the original weights."""
    names, weights = weights_but(head)
    cast = [w if name.endswith(EXACT) else _cast(w, dtype) for name, w in zip(names, weights, strict=True)]
    return holding(head, names, cast)


def _cast(weight: mx.array, dtype: mx.Dtype) -> mx.array:
    """Cast a weight. Unlike MLX's own cast, this accepts gradients in either dtype."""
    forward: Any = mx.custom_function(lambda given: given.astype(dtype))

    @forward.vjp  # type: ignore[untyped-decorator]  # MLX's
    def backward(_: mx.array, cotangent: mx.array, __: mx.array) -> mx.array:
        return cotangent.astype(weight.dtype)

    made: mx.array = forward(weight)
    return made
