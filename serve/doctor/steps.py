"""Steps of a target and a head to time: forwards of several positions, chains of draft tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TypeVar

import mlx.core as mx

from eagle_mlx.cache import RaggedCache
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.progress import progress_bar
from eagle_mlx.target import Target

Step = Callable[[], None]
Name = TypeVar("Name")
LEAST = 5
"""Steps that are timed, however long they take."""


def take_turns(
    steps: Mapping[Name, Step], repeats: int, warm_up: int, seconds: float = math.inf, progress: str | None = None
) -> dict[Name, list[float]]:
    """Time the steps in turns, each after `warm_up` calls, which compile kernels. Return the seconds of each.

    This ends after about `seconds`. If they are not enough for one turn, only the first steps are in the result, at
    least `LEAST`. `progress`: the title of a progress bar.
    """
    taken: dict[Name, list[float]] = {}
    began = perf_counter()
    with progress_bar(total=repeats * len(steps), desc=progress, unit="step", disable=progress is None) as bar:
        for turn in range(repeats):
            for name, step in steps.items():
                if perf_counter() - began > seconds and len(taken) >= min(LEAST, len(steps)):
                    return taken
                for _ in range(0 if turn else warm_up):
                    step()
                started = perf_counter()
                step()
                taken.setdefault(name, []).append(perf_counter() - started)
                bar.update()
    return taken


def filled_cache(target: Target, context: int) -> RaggedCache:
    """Return the cache of one row with this many positions."""
    cache = RaggedCache.of(target.model, 1)
    mx.eval(target.forward(mx.zeros((1, context), mx.int32), cache, ends=[context - 1]).logits)
    cache.advance(context)
    return cache


def target_step(target: Target, cache: RaggedCache, positions: int) -> Step:
    """Return a call that reads this many positions after those of the cache, which does not change."""
    tokens = mx.zeros((1, positions), mx.int32)
    return lambda: mx.eval(mx.argmax(target.forward(tokens, cache).logits, axis=-1))


def draft_steps(target: Target, head: DraftHead, context: int, depth: int) -> Step:
    """Return a call that drafts a chain of tokens, each from the one before it, like a round."""
    head.attach(target)
    cache, width = RaggedCache(head.cache_layers, 1), head.hidden_size

    def forward(tokens: mx.array, g: mx.array) -> mx.array:
        return head(head.embed(tokens), g, cache)

    mx.eval(forward(mx.zeros((1, context), mx.int32), mx.zeros((1, context, width), target.dtype)))
    cache.lengths.advance(context)

    def draft() -> None:
        tokens, g = mx.zeros((1, 1), mx.int32), mx.zeros((1, 1, width), target.dtype)
        before = cache.lengths.save()
        for _ in range(depth):
            g = forward(tokens, g)
            tokens = mx.argmax(head.logits(g), axis=-1)
            tokens = tokens if head.token_ids is None else head.token_ids[tokens]
            mx.async_eval(tokens)
            cache.lengths.advance(1)
        cache.lengths.restore(before)
        mx.eval(tokens)

    return draft
