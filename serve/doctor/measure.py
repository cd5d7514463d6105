"""The measurements of eagle-doctor. Each takes about as many seconds as it is given, and shows a progress bar."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.cache import RaggedCache
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.engine import Engine
from eagle_mlx.head_check import trial_prompts
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.plan import Plan
from eagle_mlx.policy.throughput import MOST_TOKENS
from eagle_mlx.progress import progress_bar
from eagle_mlx.proposers.base import Observation
from eagle_mlx.proposers.head import HeadProposer
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import Target

Step = Callable[[], None]
Name = TypeVar("Name")
LEAST = 5  # steps that are timed, however long they take
POSITIONS = (1, 4, 8, 2, 16, 3, 6, 32, 5, 7, 9, 33, 10, 12, 14, 11, 13, 15)
"""Positions of a verify, in an order that gives a slow machine a coarse curve in time."""
CONTEXT = 512  # tokens before a verify or a draft
REPEATS = 20
_DRAFTED = 4
_CHUNKS = 4
WIDTHS = (2, 4, 8, 16)  # positions of the verifies whose bits are compared with those of single positions
CHANCES = (0.6, 0.8)  # shares of accepted draft tokens: a usual head, a good one


@dataclass(frozen=True)
class Steps:
    """Shortest milliseconds of steps of one row: other programs can make a step slower, but never faster.

    `verify_ms` are forwards of the target, by ascending number of positions. `draft_ms` is a draft token of an EAGLE-3
    head of the usual size. `spread` is the median of a verify of one position, relative to the shortest.
    """

    context: int
    verify_ms: dict[int, float]
    draft_ms: float
    spread: float


@dataclass(frozen=True)
class SameBits:
    """Logits of verifies of `positions` each against those of one position at a time, over the same text.

    Counts positions: those compared, those with equal bits, those with the bits of verifies of two positions, and those
    with another most likely token.
    """

    positions: int
    compared: int
    equal: int
    as_two: int
    other_argmax: int
    largest_difference: float


@dataclass(frozen=True)
class BestChain:
    """The fastest chain of draft tokens by the measured steps, if each is accepted with some probability."""

    acceptance: float  # the probability that a draft token is accepted if those before it are
    depth: int  # draft tokens per round; 0 if plain decoding is fastest
    speed: float  # relative to plain decoding


def take_turns(
    steps: Mapping[Name, Step], repeats: int, warm_up: int, seconds: float = math.inf, progress: str | None = None
) -> dict[Name, list[float]]:
    """Time the steps in turns, each after `warm_up` calls. Return the seconds of each.

    If `seconds` are not enough for one turn, only the first steps are in the result, at least `LEAST`. `progress`: the
    title of a progress bar.
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


def filled_cache(target: Target, prompt: Sequence[int]) -> RaggedCache:
    """Return the cache of one row that has read a prompt."""
    cache = RaggedCache.of(target.model, 1)
    mx.eval(target.forward(mx.array([prompt], mx.int32), cache, ends=[len(prompt) - 1]).logits)
    cache.advance(len(prompt))
    return cache


def target_step(target: Target, cache: RaggedCache, positions: int) -> Step:
    """Return a call that reads this many positions after those of the cache, which does not change."""
    tokens = mx.zeros((1, positions), mx.int32)
    return lambda: mx.eval(mx.argmax(target.forward(tokens, cache).logits, axis=-1))


def draft_steps(target: Target, head: DraftHead, context: int, depth: int) -> Step:
    """Return a call that drafts a chain of tokens, each from the one before it, as in a round."""
    proposer = HeadProposer(head)
    proposer.bind(target)
    state, layer = proposer.open([[]]), mx.zeros((1, context, target.hidden_size), target.dtype)
    state.prefill(Observation([[0] * context], (layer,) * len(proposer.aux_layers)))
    sampling, positions = SamplingBatch.of([SamplingParams()], [0]), mx.array([context], mx.int32)
    return lambda: mx.eval(state.draft(Plan(depth), sampling, positions).tokens)


def time_steps(target: Target, head: DraftHead, seconds: float) -> Steps:
    """Time verifies and draft steps. A slow machine measures fewer sizes."""
    context = min(CONTEXT, target.context_length // 2)
    cache = filled_cache(target, [0] * context)
    steps = {count: target_step(target, cache, count) for count in POSITIONS}
    drafts = {0: draft_steps(target, head, context, _DRAFTED)}
    taken = take_turns(drafts | steps, REPEATS, 1, seconds, "verify and draft")
    shortest = {count: 1e3 * min(times) for count, times in taken.items()}
    draft_ms = shortest.pop(0) / _DRAFTED
    # A larger size cannot be faster.
    verify = {count: min(ms for more, ms in shortest.items() if more >= count) for count in sorted(shortest)}
    return Steps(context, verify, draft_ms, 1e3 * median(taken[1]) / verify[1])


def prefill_rate(target: Target, seconds: float) -> float:
    """Return the tokens per second at which a prompt is read."""
    chunk = min(CONTEXT, target.context_length // (_CHUNKS + 1))
    cache, tokens = RaggedCache.of(target.model, 1), mx.zeros((1, chunk), mx.int32)

    def read() -> None:
        mx.eval(target.forward(tokens, cache, ends=[chunk - 1]).logits)
        cache.advance(chunk)

    return chunk / median(take_turns({"chunk": read}, _CHUNKS, 1, seconds, "prefill")["chunk"])


def compare_bits(target: Target, count: int) -> list[SameBits]:
    """Read the target's greedy text, or random tokens, by single positions and in verifies; compare the logits."""
    prompt = trial_prompts(target)[2]
    if target.tokenizer is None:
        text = np.random.default_rng(0).integers(0, target.vocab_size, count).tolist()
    else:
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        text = Engine(target, max_batch=1).generate([prompt], params, progress=True)[0].tokens
    widths = progress_bar((1, *WIDTHS), desc="same bits", unit="width")
    logits = {width: _read(target, prompt, text, width) for width in widths}
    best = {width: logits[width].argmax(axis=-1) for width in logits}
    return [
        SameBits(
            width,
            count,
            int((logits[width] == logits[1]).all(axis=-1).sum()),
            int((logits[width] == logits[2]).all(axis=-1).sum()),
            int((best[width] != best[1]).sum()),
            float(abs(logits[width] - logits[1]).max()),
        )
        for width in WIDTHS
    ]


def _read(target: Target, prompt: Sequence[int], text: Sequence[int], width: int) -> NDArray[np.float32]:
    """Return the logits [count, V] float32 of a text, of which each forward reads `width` positions."""
    cache, logits = filled_cache(target, prompt), []
    for at in range(0, len(text), width):
        part = target.forward(mx.array([text[at : at + width]], mx.int32), cache).logits[0]
        logits.append(np.array(part.astype(mx.float32)))
        cache.advance(width)
    return np.concatenate(logits)


def best_chain(steps: Steps, chance: float) -> BestChain:
    depths = range(min(MOST_TOKENS + 1, max(steps.verify_ms)))  # larger verifies were not measured
    verify = np.interp([depth + 1 for depth in depths], list(steps.verify_ms), list(steps.verify_ms.values()))
    tokens = [sum(chance**i for i in range(depth + 1)) for depth in depths]
    speeds = [tokens[depth] / (verify[depth] + depth * steps.draft_ms) for depth in depths]
    best = max(depths, key=speeds.__getitem__)
    return BestChain(chance, best, float(speeds[best] / speeds[0]))
