"""What a run takes, by formula: memory at its peak, disk and work. docs/recipes.md explains each term."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import mlx.core as mx

from eagle_mlx.errors import ConfigError
from eagle_mlx.shards.budget import gb

from ..config import OptimizationConfig, TrainConfig
from .shapes import HeadShape, TargetShape

FLOAT = 4
"""Bytes of a number of the head's, which is trained in float32."""
PROGRAM = 250_000_000
"""Bytes that Python and the libraries take, which are no arrays of MLX's."""
_CHUNK = 1 << 25
"""Logits of the target that `--grad-checkpoint` has in memory at once."""
_MOST = 0.95
"""What of the free memory a run may be expected to take."""
_WORK_SHARE = 0.5
"""What a step reaches of the work per second of a large product of matrices."""


@dataclass(frozen=True)
class _Kept:
    """How many arrays of each size exist at the peak of a step: so many for each draft step, and so many besides."""

    logits: tuple[float, float]
    """[U, Vd], with the loss taken at U positions"""
    scores: tuple[float, float]
    """[heads, N, L]"""
    inner: tuple[float, float]
    """[N, I], with the width I of the MLP"""
    hidden: tuple[float, float]
    """[N, H]"""
    least_logits: float
    """Of the logits at least so many, whatever the number of draft steps."""


# Fitted to the peaks of MLX's allocator over 150 steps of all kinds on a CPU; benchmarks/memory_estimate.py repeats it
# on some.
_GATHERED = _Kept((2, 3), (1.5, 0), (4.3, 3.8), (19, 16), 8)
_FEEDBACK = _Kept((1.6, 1.9), (1.6, 0), (3.8, 4.3), (19, 8), 6.8)
_GATHERED_AGAIN = _Kept((0, 6.5), (2, 1), (3.75, 8.7), (14, 26), 0)
_FEEDBACK_AGAIN = _Kept((0, 6.5), (0, 3.7), (0, 15.5), (20, 8), 0)
"""Those with --grad-checkpoint, where logits and layers peak one after the other."""


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of a step."""

    target: int
    head: int
    optimizer: int
    step: int
    """Gradients, and what the forward and backward pass keep."""
    states: int = 0
    """Hidden states that are kept in memory."""

    @property
    def arrays(self) -> int:
        """What MLX's allocator is expected to report."""
        return self.target + self.head + self.optimizer + self.step

    @property
    def total(self) -> int:
        """Of the whole process."""
        return self.arrays + self.states + PROGRAM


@dataclass(frozen=True)
class Disk:
    """Bytes that a run writes and keeps."""

    heads: int
    """`best` and `last`."""
    checkpoints: int
    """States to resume from, one of them while it is written."""
    states: int = 0

    @property
    def total(self) -> int:
        return self.heads + self.checkpoints + self.states


def memory_of(target: TargetShape, head: HeadShape, config: TrainConfig, online: bool, states: int = 0) -> Memory:
    """The memory of a run with resolved settings whose every position carries loss, which is the most that can be."""
    weights = FLOAT * head.parameters
    optimizer = 2 * weights if config.optimization.optimizer == "adamw" else weights + FLOAT * 2 * head.projections // 2
    return Memory(target.weights, weights, optimizer, step_memory(target, head, config, online), states)


def step_memory(target: TargetShape, head: HeadShape, config: TrainConfig, online: bool) -> int:
    """Bytes that a step takes besides weights and optimizer: those of its largest phase."""
    step = config.optimization
    count = math.ceil(step.rows / step.accumulate) * step.length
    phases = [_passes(target, head, step, count), _update(head, step, count)]
    if online:
        phases.append(_capture(target, head, count))
    carried = head.parameters if step.accumulate > 1 else 0
    return math.ceil(FLOAT * (max(phases) + carried))


def _passes(target: TargetShape, head: HeadShape, step: OptimizationConfig, count: int) -> float:
    """Numbers at the turn from the forward to the backward pass of `count` tokens."""
    again = step.grad_checkpoint
    kept = (_GATHERED_AGAIN if again else _GATHERED) if head.gathered else (_FEEDBACK_AGAIN if again else _FEEDBACK)
    judged = min(count, _CHUNK // target.vocab_size) if again else count

    def arrays(kept: tuple[float, float]) -> float:
        return kept[0] * step.unroll + kept[1]

    scores = arrays(kept.scores) * (1 if head.gathered else (step.unroll + 1) / 2)  # with feedback: keys of all steps
    layers = (
        scores * head.heads * count * step.length
        + arrays(kept.inner) * count * head.inner
        + arrays(kept.hidden) * count * head.hidden_size
    )
    logits = max(arrays(kept.logits), kept.least_logits) * judged * head.draft_vocab
    labels = judged * target.vocab_size * (1 + (target.value / FLOAT if target.value < FLOAT else 0))
    if again:
        beside = (17 * step.unroll + 10) * count * head.hidden_size
        return max(layers, labels + logits + beside) + head.parameters / 4
    return max(logits, labels + 4 * judged * head.draft_vocab) + layers + head.parameters / 4


def _update(head: HeadShape, step: OptimizationConfig, count: int) -> float:
    """Numbers when the weights' gradients are there: MLX makes those of all draft steps before it adds them up."""
    return (step.unroll + 5) / 2 * head.parameters + 2 * step.unroll * count * head.hidden_size


def _capture(target: TargetShape, head: HeadShape, count: int) -> float:
    """Numbers while the target reads a batch: the layers' outputs that are kept, and one layer at work."""
    kept = 2 * (len(head.aux_layers) + 1) * target.hidden_size
    return count * (kept + 4 * target.inner + 8 * target.hidden_size) * target.value / FLOAT


def disk_of(head: HeadShape, config: TrainConfig, states: int = 0) -> Disk:
    """The disk that a run takes, with so many bytes of hidden states."""
    weights = FLOAT * head.parameters
    return Disk(2 * weights, (config.run.checkpoints + 1) * 3 * weights, states)


def work_of(target: TargetShape, head: HeadShape, config: TrainConfig, tokens: int, online: bool) -> float:
    """Floating-point operations of a run over so many tokens: two for each parameter that a token meets.

    The backward pass takes twice the forward pass. Measuring acceptance is not counted.
    """
    step = config.optimization
    layer = head.parameters - head.projections
    logits = head.hidden_size * head.draft_vocab
    once = max(0, head.projections - (logits if head.kind == "eagle3" else 0))
    scores = 2 * head.heads * (head.hidden_size // head.heads) * step.length / 2
    forward = 2 * (once + step.unroll * (layer + logits + scores))
    recomputed = 2 * step.unroll * (layer + scores) if step.grad_checkpoint else 0
    learnt = tokens * step.epochs * (3 * forward + recomputed + 2 * target.hidden_size * target.vocab_size)
    captured = tokens * (step.epochs if online else 1) * 2 * target.used
    return learnt + captured


def check_memory(memory: Memory, free: float, config: TrainConfig) -> None:
    """Raise ConfigError, with what would help, for a run that takes more than is free."""
    if memory.total <= _MOST * free:
        return
    step, advice = config.optimization, []
    if step.accumulate < step.rows:
        advice.append(f"--accumulate {step.rows}")
    if not step.grad_checkpoint:
        advice.append("--grad-checkpoint")
    if step.accumulate == 1 < step.rows:
        advice.append("fewer --rows")
    advice.append("a shorter --length")
    if step.unroll > 1:
        advice.append("a smaller --unroll")
    if config.head.kind == "eagle3":
        advice.append("a smaller --intermediate-size")
    if config.head.kind == "eagle3" and config.head.draft_vocab > 8192:
        advice.append("a smaller --draft-vocab")
    if memory.target + PROGRAM > _MOST * free:
        advice = ["a smaller or more strongly quantised --target"]
    raise ConfigError(
        f"this run would take {gb(memory.total)} of memory ({describe_memory(memory)}), and {gb(free)} are free; use "
        f"{', '.join(advice)}"
    )


def describe_memory(memory: Memory) -> str:
    """The parts in one line."""
    parts = [
        ("target", memory.target),
        ("head", memory.head),
        ("optimizer", memory.optimizer),
        ("gradients and activations", memory.step),
        ("hidden states", memory.states),
        ("program", PROGRAM),
    ]
    return ", ".join(f"{name} {gb(size)}" for name, size in parts if size)


def work_per_second(size: int = 1024, repeats: int = 3) -> float:
    """What this machine does in a second, in float32 products of [size, size] matrices: the best of some."""
    a = mx.random.normal((size, size), key=mx.random.key(0))
    mx.eval(a @ a)
    best = math.inf
    for _ in range(repeats):
        begin = time.perf_counter()
        mx.eval(a @ a)
        best = min(best, time.perf_counter() - begin)
    return float(2 * size**3 / best)


def hours(work: float, per_second: float) -> float:
    return work / (per_second * _WORK_SHARE) / 3600
