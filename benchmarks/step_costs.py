"""Measure what a target step, a verify, a draft step and a rollback cost; `round_parts.py` prints it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from eagle_mlx.cache import RaggedCache
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.serve.doctor.measure import Step, draft_steps, filled_cache, take_turns, target_step
from eagle_mlx.target import Target

ROWS, LAYERS, HEADS, WIDTH, HEAD_DIM = 4, 14, 8, 5, 128
"""Keys and values of a batch in the shape of a large model; WIDTH tokens per verify."""


@dataclass(frozen=True)
class StepCosts:
    """Median milliseconds of one row at a context of `context` tokens; the parts take turns."""

    context: int
    target_ms: float
    """A forward of the target over one token."""
    verify_ms: dict[int, float]
    """A forward of the target over a token and a draft, by the draft's length."""
    draft_ms: float | None
    """A head's step for one token, timed over all steps of a round; None without a head."""
    draft_to_target: float | None
    """Median of the pairs' ratios."""

    def __str__(self) -> str:
        verify = ", ".join(f"{ms:.2f} ms with {depth} drafted" for depth, ms in self.verify_ms.items())
        text = f"at {self.context} tokens of context: target step {self.target_ms:.2f} ms; verify {verify}"
        if self.draft_ms is None:
            return text
        return f"{text}; draft step {self.draft_ms:.2f} ms, {self.draft_to_target:.3f} of a target step"


def measure_costs(
    target: Target, head: DraftHead | None, depths: Sequence[int], context: int = 128, repeats: int = 60
) -> StepCosts:
    """Time the parts in turns, after a warm-up. The caches' content makes no difference."""
    cache, deepest = filled_cache(target, [0] * context), max(depths)
    parts: dict[str, Step] = {"target": target_step(target, cache, 1)}
    parts |= {f"verify {depth}": target_step(target, cache, depth + 1) for depth in depths}
    if head is not None:
        parts["draft"] = draft_steps(target, head, context, deepest)
    seconds = take_turns(parts, repeats, warm_up=5)
    ms = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
    verify = {depth: ms[f"verify {depth}"] for depth in depths}
    if head is None:
        return StepCosts(context, ms["target"], verify, None, None)
    ratio = statistics.median(a / b for a, b in zip(seconds["draft"], seconds["target"], strict=True))
    return StepCosts(context, ms["target"], verify, ms["draft"] / deepest, ratio / deepest)


@dataclass(frozen=True)
class RollbackCost:
    short_context: int
    long_context: int
    short_ms: float
    """Median milliseconds of a verify's writes and the rollback, all layers."""
    long_ms: float
    ratio: float
    """Median of the ratios long / short, pair by pair."""

    def __str__(self) -> str:
        return (
            f"rollback: {self.short_ms:.2f} ms at {self.short_context} tokens of context, {self.long_ms:.2f} ms at "
            f"{self.long_context}, ratio {self.ratio:.2f}"
        )


def _lengths(context: int) -> list[int]:
    return [context - row for row in range(ROWS)]


def _filled(context: int) -> RaggedCache:
    """Return a cache whose rows hold about `context` positions, each with its own number."""
    cache = RaggedCache(LAYERS, ROWS)
    new = mx.zeros((ROWS, HEADS, context, HEAD_DIM))
    for layer in cache:
        layer.update_and_fetch(new, new)
    cache.lengths.advance(mx.array(_lengths(context), mx.int32), at_most=context)
    cache.lengths.sync(_lengths(context))
    mx.eval(cache.state, cache.lengths.offset)
    return cache


def _round(cache: RaggedCache, new: mx.array, accepted: list[int]) -> float:
    """Return the seconds for a verify's writes and the rollback of each row's rejected tokens."""
    before, context = cache.lengths.save(), cache.lengths.upper
    begin = time.perf_counter()
    for layer in cache:
        layer.update_and_fetch(new, new)
    cache.lengths.advance(mx.array(accepted, mx.int32), at_most=WIDTH)
    mx.eval(cache.state, cache.lengths.offset)
    cache.lengths.sync([a + b for a, b in zip(_lengths(context), accepted, strict=True)])
    seconds = time.perf_counter() - begin
    cache.lengths.restore(before)
    return seconds


def measure_rollback(short: int = 256, long: int = 4096, repeats: int = 60) -> RollbackCost:
    """Time rounds at both contexts in turn, after a warm-up."""
    caches = _filled(short), _filled(long)
    new = mx.random.normal((ROWS, HEADS, WIDTH, HEAD_DIM))
    mx.eval(new)
    pairs = []
    for repeat in range(repeats + 5):
        accepted = [1 + (repeat + i) % WIDTH for i in range(ROWS)]
        pairs.append(tuple(_round(cache, new, accepted) for cache in caches))
    pairs = pairs[5:]
    return RollbackCost(
        short,
        long,
        1e3 * statistics.median(a for a, _ in pairs),
        1e3 * statistics.median(b for _, b in pairs),
        statistics.median(b / a for a, b in pairs),
    )
