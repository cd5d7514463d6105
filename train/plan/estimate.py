"""What a run takes, by formula: memory at its peak, disk and work. docs/recipes.md explains each term."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eagle_mlx.errors import ConfigError
from eagle_mlx.shards.budget import gb

from ..config import OptimizationConfig, TrainConfig
from ..kinds.least_squares import bytes_of
from .shapes import HeadShape, TargetShape

FLOAT = 4
"""Bytes of a weight, a moment and a gradient, which are in float32."""
PROGRAM = 250_000_000
"""Bytes that Python and the libraries take, which are no arrays of MLX's."""
_CHUNK = 1 << 25
"""Logits of the target that are in memory at once."""
_MOST = 0.95
"""What of the free memory a run may be expected to take."""
_WORK_SHARE = 0.5
"""What a step reaches of the work per second of a large product of matrices."""


@dataclass(frozen=True)
class _Kept:
    """How many arrays of each size exist at the peak of a step: so many for each draft step, and so many besides."""

    scores: tuple[float, float]
    """[heads, N, L], in float32"""
    inner: tuple[float, float]
    """[N, I], with the width I of the MLP"""
    hidden: tuple[float, float]
    """[N, H]"""
    logits: float
    """[U, Vd] in float32, with the loss taken at U positions"""
    weights: float
    """Gradients of all weights, when those of the last draft step are there."""
    judged: tuple[float, float] = (0, 0)
    """[N, H], beside the logits, where the layers' own are not there."""


# Fitted to the peaks of MLX's allocator over 132 steps of all kinds on a CPU; benchmarks/memory_estimate.py repeats it
# on some.
_GATHERED = _Kept((0.7, 0.5), (6.5, 0), (17.2, 8.6), 7.5, 1.6)
_FEEDBACK = _Kept((1.3, 0), (5.8, 0), (11.5, 0), 5.9, 1.8)
_GATHERED_AGAIN = _Kept((0, 5.3), (1.6, 9), (2, 28), 8, 0.8, (8.4, 0))
_FEEDBACK_AGAIN = _Kept((0, 5), (0.3, 11.5), (3, 0.2), 4, 1.6, (8.5, 2.9))
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
    start: int = 0
    """What the linear start of a new head takes, before there are gradients."""

    @property
    def arrays(self) -> int:
        """What MLX's allocator is expected to report."""
        return self.target + self.head + self.optimizer + self.step

    @property
    def total(self) -> int:
        """Of the whole process."""
        return self.target + self.head + max(self.optimizer + self.step, self.start) + self.states + PROGRAM


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


def memory_of(
    target: TargetShape, head: HeadShape, config: TrainConfig, online: bool, states: int = 0, value: int = FLOAT
) -> Memory:
    """The memory of a run with resolved settings whose every position carries loss, which is the most that can be.

    `value` are the bytes of a number in the forward and backward pass.
    """
    weights = FLOAT * head.parameters
    optimizer = 2 * weights if config.optimization.optimizer == "adamw" else weights + FLOAT * 2 * head.projections // 2
    step = step_memory(target, head, config, online, value)
    linear = config.head.start == "linear" and not config.head.init_from
    return Memory(target.weights, weights, optimizer, step, states, start_memory(target, head) if linear else 0)


def start_memory(target: TargetShape, head: HeadShape) -> int:
    """Bytes of finding a head's linear guess: from the layers that it reads and an embedding to a state."""
    states = max(1, len(head.aux_layers)) * target.hidden_size
    return bytes_of(states + head.hidden_size, head.hidden_size)


def step_memory(target: TargetShape, head: HeadShape, config: TrainConfig, online: bool, value: int = FLOAT) -> int:
    """Bytes that a step takes besides weights and optimizer: those of its largest phase."""
    step = config.optimization
    count = math.ceil(step.rows / step.accumulate) * step.length
    share = value / FLOAT
    cast = share * head.parameters if value < FLOAT else 0  # the weights that the passes read
    gradients = 1.75 * head.parameters + share * 2 * step.unroll * count * head.hidden_size
    phases = [
        _passes(target, head, step, count, share) + cast,
        gradients + cast,
        head.parameters + 4 * head.largest,  # the update: the optimizer's numbers for one matrix at a time
    ]
    if online:
        phases.append(_capture(target, head, count))
    carried = head.parameters if step.accumulate > 1 else 0
    return math.ceil(FLOAT * (max(phases) + carried))


def _passes(target: TargetShape, head: HeadShape, step: OptimizationConfig, count: int, share: float) -> float:
    """Numbers of 4 bytes at the turn from the forward to the backward pass; `share` of them one of the passes' takes.

    Gradients of draft steps are added as they come (`unroll/recompute.py`): their number does not multiply them.
    """
    again = step.grad_checkpoint
    kept = (_GATHERED_AGAIN if again else _GATHERED) if head.gathered else (_FEEDBACK_AGAIN if again else _FEEDBACK)
    judged = min(count, _CHUNK // target.vocab_size)

    def arrays(kept: tuple[float, float]) -> float:
        return kept[0] * step.unroll + kept[1]

    scores = arrays(kept.scores) * (1 if head.gathered else (step.unroll + 1) / 2)  # with feedback: keys of all steps
    layers = scores * head.heads * count * step.length + share * (
        arrays(kept.inner) * count * head.inner + arrays(kept.hidden) * count * head.hidden_size
    )
    labels = judged * target.vocab_size * (1 + (target.value / FLOAT if target.value < FLOAT else 0))
    loss = labels + kept.logits * judged * head.draft_vocab + head.parameters / 4
    loss += share * arrays(kept.judged) * count * head.hidden_size if again else layers
    return max(loss, layers + kept.weights * head.parameters)


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


def fits(memory: Memory, free: float) -> bool:
    """Whether a run takes no more than may be expected of what is free."""
    return memory.total <= _MOST * free


def check_memory(memory: Memory, free: float, config: TrainConfig) -> None:
    """Raise ConfigError, with what would help, for a run that takes more than is free."""
    if fits(memory, free):
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
    learning = [("optimizer", memory.optimizer), ("gradients and activations", memory.step)]
    parts = [
        ("target", memory.target),
        ("head", memory.head),
        *(learning if memory.optimizer + memory.step > memory.start else [("--start linear", memory.start)]),
        ("hidden states", memory.states),
        ("program", PROGRAM),
    ]
    return ", ".join(f"{name} {gb(size)}" for name, size in parts if size)


def hours(work: float, per_second: float) -> float:
    return work / (per_second * _WORK_SHARE) / 3600
